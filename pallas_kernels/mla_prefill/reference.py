"""The specification of `mla_prefill`, in float32; used by tests only."""

import jax
import jax.numpy as jnp


def mla_prefill(q, k, v, q_lens, kv_lens, *, scale, causal=True, dtype=jnp.float32):
    """All scores at once, masked by the queries' and keys' lengths and by position."""
    T, S = q.shape[1], k.shape[1]
    asked, held = jnp.arange(T) < q_lens[:, None], jnp.arange(S) < kv_lens[:, None]
    seen = asked[:, :, None] & held[:, None]
    if causal:
        position = (kv_lens - q_lens)[:, None] + jnp.arange(T)
        seen &= jnp.arange(S) <= position[..., None]
    q = jnp.where(asked[..., None, None], q, 0).astype(dtype)
    k, v = (jnp.where(held[..., None, None], x, 0).astype(dtype) for x in (k, v))
    exact = {"precision": "highest", "preferred_element_type": dtype}
    scores = jnp.where(seen[:, :, None], jnp.einsum("btnh,bsnh->btns", q, k, **exact) * scale, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])
    return jnp.einsum("btns,bsnv->btnv", weights, v, **exact), lse
