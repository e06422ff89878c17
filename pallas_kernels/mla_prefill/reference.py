"""The specification of `mla_prefill`, in float32; used by tests only."""

import jax
import jax.numpy as jnp


def mla_prefill(q, k, v, first, stop, *, scale, dtype=jnp.float32):
    """All scores at once, masked by the queries' ranges of keys."""
    key = jnp.arange(k.shape[1])
    seen = (first[..., None] <= key) & (key < stop[..., None])
    asked = seen.any(axis=2)
    held = key < jnp.where(asked, stop, 0).max(axis=1, keepdims=True)
    q = jnp.where(asked[..., None, None], q, 0).astype(dtype)
    k, v = (jnp.where(held[..., None, None], x, 0).astype(dtype) for x in (k, v))
    exact = {"precision": "highest", "preferred_element_type": dtype}
    scores = jnp.where(seen[:, :, None], jnp.einsum("btnh,bsnh->btns", q, k, **exact) * scale, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])
    return jnp.einsum("btns,bsnv->btnv", weights, v, **exact), lse
