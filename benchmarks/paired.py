"""The mean difference of paired cases, with the interval that the bootstrap gives."""

from typing import NamedTuple

import numpy as np
from scipy.stats import bootstrap

DRAWS = 10_000


class Difference(NamedTuple):
    mean: float
    low: float  # the ends of the 95 % interval
    high: float

    @classmethod
    def of(cls, mine: np.ndarray, other: np.ndarray) -> "Difference":
        """Of `mine` less `other`, case by case."""
        apart = np.asarray(mine, float) - np.asarray(other, float)
        mean = float(apart.mean())
        if np.ptp(apart) == 0:  # nothing to draw from
            return cls(mean, mean, mean)
        drawn = bootstrap(
            (apart,), np.mean, n_resamples=DRAWS, method="percentile", rng=np.random.default_rng(0)
        )
        return cls(mean, *map(float, drawn.confidence_interval))

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f})"
