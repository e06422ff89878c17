"""The fallback, for any device and dtype."""

import jax
import jax.numpy as jnp


def moe_decode(x, topk_ids, topk_weights, gate, up, down):
    """The contract is the package's."""
    chosen = (w.at[topk_ids].get(mode="clip") for w in (gate, up, down))
    return of_chosen(x, topk_weights, topk_ids < gate.shape[0], *chosen)


def of_chosen(x, topk_weights, some, gate, up, down):
    """The same with the weights of each token's experts, `[n K F D]` and `[n K D F]`; `some`: there is one.

    Written as sums of products, which XLA fuses with the choice, so that no expert is copied out; einsums are twice as slow."""

    def times(a, w):
        return (a.astype(jnp.float32) * w.astype(jnp.float32)).sum(-1)

    hidden = jax.nn.silu(times(x[:, None, None], gate)) * times(x[:, None, None], up)
    y = times(hidden.astype(x.dtype)[:, :, None], down) * topk_weights[:, :, None]
    return jnp.where(some[:, :, None], y, 0).sum(1).astype(x.dtype)
