"""The specification of `mla_sparse`, query by query in float64 numpy; used by tests only."""

import numpy as np

from pallas_kernels.fp8 import Fp8, dequantize


def mla_sparse(q_c, q_pe, c_kv, k_pe, slots, counts, *, scale):
    """As `mla_sparse` of the package."""
    c_kv = dequantize(c_kv) if isinstance(c_kv, Fp8) else c_kv
    q_c, q_pe, c_kv, k_pe = (np.asarray(x, np.float64) for x in (q_c, q_pe, c_kv, k_pe))
    latents, rotary = (x.reshape(-1, x.shape[-1]) for x in (c_kv, k_pe))
    out, lse = np.zeros(q_c.shape), np.full(q_c.shape[:-1], -np.inf)
    for b, t in np.argwhere(np.asarray(counts) > 0):
        chosen = np.asarray(slots)[b, t, : counts[b, t]]
        c, pe = latents[chosen], rotary[chosen]
        scores = (q_c[b, t] @ c.T + q_pe[b, t] @ pe.T) * scale
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        out[b, t] = weights @ c / total
        lse[b, t] = (top + np.log(total))[:, 0]
    return out, lse
