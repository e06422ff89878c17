"""Latents cached in E4M3, quantised as they are appended: a scale, a power of two, per 128 numbers; rotary keys as computed.

This is half the bytes of a bfloat16 cache, so twice the tokens fit. The decode kernel reads the codes as they are. `over(form)`
changes a form that caches latents into one that caches these."""

from typing import Any

from jaxtyping import Array, Float

from mla_jax.base.config import Config
from mla_jax.model import kernels
from mla_jax.model.fp8_up import Up
from mla_jax.model.mla import FORMS, Form, latents

CODES, SCALES = "c_kv", "c_kv_scale"  # names in a layer of the cache


def why_not(config: Config, form: str) -> str | None:
    """Why a model's cache cannot have this format; None: it can."""
    if form in FORMS and FORMS[form].remembers is not latents:
        return f"the form {form} caches other arrays than latents"
    group = kernels.fp8_group()
    if config.kv_lora_rank % group:
        return f"there is a scale per {group} numbers, and the latent has {config.kv_lora_rank}"
    return None


def remembers(
    c_kv: Float[Array, "B S R"], k_pe: Float[Array, "B S E"], up: Up | None = None, x: Any = None
) -> dict[str, Array]:
    codes, scales = kernels.quantize_latent(c_kv)
    return {CODES: codes, SCALES: scales, "k_pe": k_pe}


def latent_operand(cached: dict[str, Any]) -> Any:
    """The latents of a layer as kernels take them, in E4M3 or not."""
    return kernels.fp8(cached[CODES], cached[SCALES]) if SCALES in cached else cached["c_kv"]


def unpacked_latent(cached: dict[str, Array]) -> dict[str, Array]:
    """The cached latents as numbers, which is what the forms of mla.py take."""
    if SCALES not in cached:
        return {"c_kv": cached["c_kv"], "k_pe": cached["k_pe"]}
    return {
        "c_kv": kernels.dequantize_latent(cached[CODES], cached[SCALES], cached["k_pe"].dtype),
        "k_pe": cached["k_pe"],
    }


def over(form: Form) -> Form:
    """`form`, over latents cached in E4M3. No kernel appends them; kernels read E4M3 by themselves."""
    return Form(remembers, form.attends, form.prepare, reads=unpacked_latent)
