"""The specification of `rope_append`, token by token in float64 numpy; used by tests only."""

import numpy as np


def rope_append(q, kv, weight, tokens, cache, *, eps, interleave):
    """As `rope_append` of the package, for numpy arrays."""
    q, kv, weight = (np.asarray(x, np.float64) for x in (q, kv, weight))
    rank, positions, cos, sin = (np.asarray(x) for x in tokens)
    c_kv, k_pe, at, length = (np.array(x, np.float64 if x.ndim == 3 else np.int64) for x in cache)
    R, E = c_kv.shape[-1], k_pe.shape[-1]
    queries = np.zeros((*q.shape[:3], E))
    for b, t in np.ndindex(rank.shape):
        turns = (cos[b, t] + 1j * sin[b, t]).astype(np.complex128)
        queries[b, t] = [turned(head[-E:], turns, interleave) for head in q[b, t]]
        slot = length[b] + rank[b, t]
        if rank[b, t] >= 0 and slot < c_kv.shape[1]:
            c_kv[b, slot] = kv[b, t, :R] / np.sqrt(np.mean(kv[b, t, :R] ** 2) + eps) * weight
            k_pe[b, slot], at[b, slot] = turned(kv[b, t, R:], turns, interleave), positions[b, t]
    length[: len(rank)] += (rank >= 0).sum(1)
    return queries, (c_kv, k_pe, at, length)


def turned(x, turns, interleave):
    """Pairs as complex numbers times `turns`."""
    half = len(x) // 2
    pairs = (x[0::2] + 1j * x[1::2] if interleave else x[:half] + 1j * x[half:]) * turns
    both = (pairs.real, pairs.imag)
    return np.stack(both, axis=-1).reshape(-1) if interleave else np.concatenate(both)
