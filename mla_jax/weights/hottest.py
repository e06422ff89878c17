"""Which experts of the layers on the host lie on the device, too, and how many layers lie on the host, so that tokens wait least.

What a token brings is worth the same in every layer, so memory goes to the experts that are chosen most often for their bytes."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float

from mla_jax.base.roofline import Routed


def hottest(
    chosen: Float[np.ndarray, "L X"], sizes: Sequence[int], budget: float, most: int | None = None
) -> Bool[np.ndarray, "L X"]:
    """The experts that are chosen most often for their bytes, `sizes` a layer, as many as the `budget` of bytes holds, or `most`.

    Of equally good ones those of different layers come first, so that without statistics all layers get as many."""
    each = np.broadcast_to(np.asarray(sizes, float)[:, None], chosen.shape)
    order = np.argsort(-(chosen / each).T.ravel(), kind="stable")
    count = int(np.searchsorted(np.cumsum(each.T.ravel()[order]), budget, side="right"))
    held = np.zeros(chosen.size, bool)
    held[order[: count if most is None else min(count, most)]] = True
    return held.reshape(chosen.T.shape).T


def best_split(
    splits: Iterable[tuple[int, Routed]], seconds: Callable[[int, Routed], float], worth: float = 0.99
) -> tuple[int, Routed]:
    """The number of layers on the host, and which of their experts the device holds, with which a step is fastest.

    One with more layers on the host must be so much faster than those before it."""
    best, least = None, float("inf")
    for count, routed in splits:
        if (taken := seconds(count, routed)) < worth * least:
            best, least = (count, routed), taken
    assert best is not None
    return best
