"""Products with the halves of kv_b_proj, `uk [N P R]` and `uv [N V R]`, which may be in FP8 (`fp8_column`).

A checkpoint's blocks have as many rows as a head's half where `stays_fp8` says so: then a number is an E4M3 code times the scale
of its head and column. Scales are kept out of the matmul, whose codes XLA converts as it reads them; a matrix that is multiplied
by scales a GPU writes out first, in bf16."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from mla_jax.base.config import Config
from mla_jax.base.qtensor import QTensor, factors, format_of
from mla_jax.model.ops import plain

Up = tuple[Float[Array, "N P R"] | QTensor, Float[Array, "N V R"] | QTensor]


def stays_fp8(format: str, config: Config) -> bool:
    """Whether a kv_b_proj stored in this format stays so: no block of it has rows of two heads, or of both halves of one."""
    if not format.startswith("fp8_block"):
        return False
    rows = format_of(format).block[0]
    return config.qk_nope_head_dim == config.v_head_dim == rows


def plain_up(up: Up, dtype: jnp.dtype) -> tuple[Float[Array, "N P R"], Float[Array, "N V R"]]:
    """Both halves without scales."""
    return plain(up[0], dtype), plain(up[1], dtype)


def to_latent(
    q_nope: Float[Array, "B T N P"], uk: Float[Array, "N P R"] | QTensor
) -> Float[Array, "B T N R"]:
    """Each head's plain query as one that meets latents."""
    dtype = q_nope.dtype
    if not isinstance(uk, QTensor) or _tokens(q_nope) == 1:
        return jnp.einsum("btnp,npr->btnr", q_nope, plain(uk, dtype))
    codes, scale = factors(uk, dtype)
    # Codes come first: a CPU has no such product in bfloat16 the other way round
    q_c = jnp.einsum("npr,btnp->btnr", codes, q_nope, preferred_element_type=jnp.float32)
    return (scale * q_c).astype(dtype)


def from_latent(
    o_c: Float[Array, "B T N R"], uv: Float[Array, "N V R"] | QTensor, dtype: jnp.dtype
) -> Float[Array, "B T N V"]:
    """Each head's value of a sum of latents, computed in `dtype`."""
    mix, tokens = "btnr,nvr->btnv", _tokens(o_c)
    # Of more than V tokens, to scale sums and write them moves more bytes than to unpack `uv`
    if not isinstance(uv, QTensor) or tokens == 1 or tokens > uv.shape[1]:
        return jnp.einsum(mix, o_c.astype(dtype), plain(uv, dtype))
    codes, scale = factors(uv, dtype)
    return jnp.einsum(mix, (scale * o_c).astype(dtype), codes)


def _tokens(x: Float[Array, "B T N H"]) -> int:
    """Of a step; for one XLA makes sums of products, no matmul, and unpacks in registers."""
    return x.shape[0] * x.shape[1]
