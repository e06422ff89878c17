"""The fallback for any device and dtype."""

import jax
import jax.numpy as jnp


def moe_decode(x, topk_ids, topk_weights, gate, up, down):
    """As `moe_decode` of the package."""
    chosen = (w.at[topk_ids].get(mode="clip") for w in (gate, up, down))
    return of_chosen(x, topk_weights, topk_ids < gate.shape[0], *chosen)


def of_chosen(x, topk_weights, some, gate, up, down):
    """The same, given the weights of each token's experts, `[n K F D]` and `[n K D F]`; `some`: whether there is an expert.

    Written as sums of products, which XLA fuses with the gather, so that no expert is copied; einsums take twice the time."""

    def times(a, w):
        return (a.astype(jnp.float32) * w.astype(jnp.float32)).sum(-1)

    hidden = jax.nn.silu(times(x[:, None, None], gate)) * times(x[:, None, None], up)
    y = times(hidden.astype(x.dtype)[:, :, None], down) * topk_weights[:, :, None]
    return jnp.where(some[:, :, None], y, 0).sum(1).astype(x.dtype)
