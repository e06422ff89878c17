"""Latents held in E4M3, quantised as they are appended: a scale, a power of two, for each 128 numbers; rotary keys as computed.

Half the bytes of a cache in bfloat16, so that twice the tokens fit, and the decode kernel reads them as they are. A form that
remembers latents is changed into one that remembers these: `over(form)`."""

from typing import Any

from jaxtyping import Array, Float

from mla_jax.base.config import Config
from mla_jax.model.mla import Form, Mask, Queries, Up
from mla_jax.model.ops import fp8

NAMES = "c_kv", "c_kv_scale"  # in a layer of the cache


def why_not(config: Config, form: str) -> str | None:
    """Why a model's cache cannot be held so; None: it can."""
    if form == "naive":
        return "the form naive holds heads, not latents"
    if config.kv_lora_rank % (group := fp8().GROUP):
        return f"scales are of {group} numbers, and the latent has {config.kv_lora_rank}"
    return None


def remembers(c_kv: Float[Array, "B S R"], k_pe: Float[Array, "B S E"], up: Up | None = None) -> dict[str, Array]:
    return dict(zip(NAMES, fp8().quantize_cache(c_kv), strict=True)) | {"k_pe": k_pe}


def operand(held: dict[str, Any]) -> Any:
    """The latents of a layer as kernels take them, in E4M3 or not."""
    return fp8().Fp8(*(held[name] for name in NAMES)) if NAMES[1] in held else held["c_kv"]


def unpacked(held: dict[str, Array]) -> dict[str, Array]:
    """What is held, as the forms of mla.py know it; they need not know how it is held."""
    latent, k_pe = operand(held), held["k_pe"]
    return {"c_kv": fp8().dequantize(latent).astype(k_pe.dtype) if isinstance(latent, fp8().Fp8) else latent, "k_pe": k_pe}


def over(form: Form) -> Form:
    """`form`, over latents held in E4M3."""

    def attends(q: Queries, held: dict[str, Array], up: Up, mask: Mask, scale: float) -> Float[Array, "B T N V"]:
        return form.attends(q, unpacked(held), up, mask, scale)

    return Form(remembers, attends)
