"""The specification of `rope_append`, token by token in float64 numpy; used by tests only."""

import numpy as np


def rope_append(q, kv, weight, tokens, cache, *, eps, interleave):
    """As `rope_append` of the package, for numpy arrays."""
    q, kv, weight = (np.asarray(x, np.float64) for x in (q, kv, weight))
    slots, cos, sin = (np.asarray(x) for x in tokens)
    c_kv, k_pe = (np.array(x, np.float64) for x in cache)
    (G, Z, R), E = c_kv.shape, k_pe.shape[-1]
    queries = np.zeros((*q.shape[:3], E))
    for b, t in np.ndindex(slots.shape):
        turns = (cos[b, t] + 1j * sin[b, t]).astype(np.complex128)
        queries[b, t] = [turned(head[-E:], turns, interleave) for head in q[b, t]]
        if 0 <= slots[b, t] < G * Z:
            at = divmod(slots[b, t], Z)
            c_kv[at] = kv[b, t, :R] / np.sqrt(np.mean(kv[b, t, :R] ** 2) + eps) * weight
            k_pe[at] = turned(kv[b, t, R:], turns, interleave)
    return queries, (c_kv, k_pe)


def turned(x, turns, interleave):
    """Pairs as complex numbers times `turns`."""
    half = len(x) // 2
    pairs = (x[0::2] + 1j * x[1::2] if interleave else x[:half] + 1j * x[half:]) * turns
    both = (pairs.real, pairs.imag)
    return np.stack(both, axis=-1).reshape(-1) if interleave else np.concatenate(both)
