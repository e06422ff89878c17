"""The specification of `rms_norm`, in float64 numpy; used by tests only."""

import numpy as np


def rms_norm(x, weight, y=None, *, eps):
    """As `rms_norm` of the package, for numpy arrays."""
    x, weight = (np.asarray(a, np.float64) for a in (x, weight))
    total = x if y is None else x + np.asarray(y, np.float64)
    return total, total / np.sqrt(np.mean(total**2, axis=-1, keepdims=True) + eps) * weight
