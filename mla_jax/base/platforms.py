"""JAX's first device, and one clear error where JAX cannot start on the platform that it is told to use."""

import importlib.util
from typing import Any

import jax

from mla_jax.base.errors import Unsupported, printable

INSTALL = {
    "cuda": 'install CUDA support, in the checkout: pip install ".[cuda12]" (or ".[cuda13]", as the driver has it)',
    "tpu": 'install TPU support, in the checkout: pip install ".[tpu]"',
}
PLUGINS = {"cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin"), "tpu": ("libtpu",)}
SAME = {"gpu": "cuda"}  # names that JAX has for one platform


def default_device() -> Any:
    """This process's first device; raises Unsupported where JAX cannot use the platform that JAX_PLATFORMS names."""
    try:
        return jax.local_devices()[0]
    except (RuntimeError, AssertionError) as e:
        # An AssertionError without words if CUDA support is not installed
        asked = jax.config.values["jax_platforms"] or ""
        raise Unsupported(_finding(asked), *_advice(asked), *_cause(e)) from e


def _finding(asked: str) -> str:
    return (
        f"JAX cannot use the platform of JAX_PLATFORMS={printable(asked)}"
        if asked
        else "JAX cannot start on this machine"
    )


def _advice(asked: str) -> list[str]:
    """Advice for the first platform asked for: the package to install, and how to run without it."""
    platform = asked.split(",", maxsplit=1)[0].strip()
    platform = SAME.get(platform, platform)
    lines = []
    if platform in INSTALL and not any(map(importlib.util.find_spec, PLUGINS[platform])):
        lines.append(INSTALL[platform])
    elif platform in INSTALL:
        lines.append(
            "its support is installed, but no such device was found; see: python -m mla_jax.generate --doctor"
        )
    elif platform and platform != "cpu":
        lines.append("known platforms: cpu, cuda, tpu")
    if asked:
        lines.append("or unset JAX_PLATFORMS to run on what there is; JAX_PLATFORMS=cpu takes the CPU")
    return lines


def _cause(error: Exception) -> list[str]:
    words = str(error).strip().splitlines()
    return [f"JAX says: {printable(words[0], 300)}"] if words else []
