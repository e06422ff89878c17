"""The specification of `heads_decode`, head by head in float64 numpy; used by tests only."""

import numpy as np


def heads_decode(q, k, v, page_table, seq_lens, *, scale):
    """As `heads_decode` of the package, for numpy arrays."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    (rows, heads, _), size = q.shape, k.shape[1]
    out, lse = np.zeros((rows, heads, v.shape[-1])), np.full((rows, heads), -np.inf)
    for b, n in np.ndindex(rows, heads):
        mine = n if len(page_table) > 1 else 0
        slots = np.arange(seq_lens[mine, b])
        entry = np.asarray(page_table)[mine, b, slots // size]
        page, head = np.divmod(entry, heads) if len(page_table) > 1 else (entry, n)
        if slots.size:
            scores = k[page, slots % size, head] @ q[b, n] * scale
            weights = np.exp(scores - scores.max())
            out[b, n] = weights @ v[page, slots % size, head] / weights.sum()
            lse[b, n] = scores.max() + np.log(weights.sum())
    return out, lse
