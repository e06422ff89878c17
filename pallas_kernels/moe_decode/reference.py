"""The specification of `moe_decode`, token by token in float64 numpy; used by tests only."""

import numpy as np


def moe_decode(x, topk_ids, topk_weights, gate, up, down):
    """As `moe_decode` of the package, for numpy arrays."""
    x, share, gate, up, down = (np.asarray(a, np.float64) for a in (x, topk_weights, gate, up, down))
    out = np.zeros_like(x)
    for (t, k), expert in np.ndenumerate(np.asarray(topk_ids)):
        if expert < len(gate):
            a = gate[expert] @ x[t]
            out[t] += share[t, k] * (down[expert] @ (a / (1 + np.exp(-a)) * (up[expert] @ x[t])))
    return out
