"""Counts of the tokens that chose each expert: taken while the model answers, kept in a file, and used for placement."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, BadRequest, printable
from mla_jax.base.files import read_json, write_json

MOST = 64 << 20  # bytes of such a file
MAX_COUNT = 2**53  # of a count: what any reader of JSON keeps exact
MODEL_KEYS = (  # what another model would differ in
    "model_type",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "n_routed_experts",
    "num_experts_per_tok",
    "vocab_size",
)


@dataclass
class Routing:
    """`counts` `[layers X]` of the model's layers with experts, in order; MTP's, which only drafts run, are not counted."""

    path: Path
    config: Config
    counts: np.ndarray

    @staticmethod
    def open(path: Path, config: Config) -> "Routing":
        """The file's counts, zeros if there is no file. Raises BadFile if it is damaged or of another model."""
        layers = _layers(config)
        if not layers:
            raise BadRequest("this model has no routed experts to count", "leave out routing_stats")
        if not path.exists():
            return Routing(path, config, np.zeros((len(layers), config.n_routed_experts or 0), np.int64))
        found = read_json(path, MOST)
        _check_model(path, found.get("model"), config)
        return Routing(path, config, _counts(path, found.get("chosen"), layers, config.n_routed_experts or 0))

    @property
    def tokens(self) -> int:
        """How many were counted."""
        return int(self.counts[0].sum() / (self.config.routed_per_token or 1))

    def chosen(self, layers: list[int]) -> np.ndarray:
        """How likely a token is to choose each expert of some layers `[L X]`; all the same where nothing was counted."""
        counts = self.counts[[_layers(self.config).index(layer) for layer in layers]].astype(float)
        totals = counts.sum(1, keepdims=True)
        even = np.full_like(counts, 1 / max(counts.shape[1], 1))
        return (self.config.routed_per_token or 1) * np.divide(counts, totals, out=even, where=totals > 0)

    def of_layers(self) -> dict[int, np.ndarray]:
        """The counts by the numbers of layers."""
        return dict(zip(_layers(self.config), self.counts, strict=True))

    def save(self) -> None:
        """Raises BadRequest where the file cannot be written."""
        layers = map(str, _layers(self.config))
        chosen = dict(zip(layers, np.minimum(self.counts, MAX_COUNT).tolist(), strict=True))
        try:
            write_json(self.path, {"model": _identity(self.config), "chosen": chosen})
        except OSError as e:
            raise BadRequest(
                f"{self.path} cannot be written", e.strerror or str(e), "choose another file"
            ) from e


def _layers(config: Config) -> list[int]:
    return [i for i in range(config.num_hidden_layers) if config.is_moe(i)]


def _identity(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in MODEL_KEYS}


def _check_model(path: Path, found: Any, config: Config) -> None:
    if not isinstance(found, dict):
        raise BadFile(f"{path} holds no routing statistics", 'expected "model" and "chosen"', _ADVICE)
    expected = _identity(config)
    differing = [
        f"{key}: found {printable(repr(found.get(key)))}, expected {expected[key]!r}" for key in MODEL_KEYS
    ]
    differing = [
        line for key, line in zip(MODEL_KEYS, differing, strict=True) if found.get(key) != expected[key]
    ]
    if differing:
        raise BadFile(f"{path} holds routing statistics of another model", *differing, _ADVICE)


def _counts(path: Path, found: Any, layers: list[int], experts: int) -> np.ndarray:
    """Rows of whole numbers, a layer each."""
    if not isinstance(found, dict) or found.keys() != set(map(str, layers)):
        shown = ", ".join(map(printable, found)) if isinstance(found, dict) else type(found).__name__
        expected = f"expected layers {layers[0]} to {layers[-1]}"
        raise BadFile(
            f"{path} holds damaged routing statistics",
            f"found {shown[:200] or 'no layers'}",
            expected,
            _ADVICE,
        )
    for layer, row in found.items():
        if (
            not isinstance(row, list)
            or len(row) != experts
            or not all(type(n) is int and 0 <= n <= MAX_COUNT for n in row)
        ):
            expected = f"expected {experts} whole numbers from 0 on, how often each expert was chosen"
            raise BadFile(
                f"{path} holds damaged routing statistics",
                f"layer {layer} has something else",
                expected,
                _ADVICE,
            )
    return np.array([found[str(layer)] for layer in layers], np.int64)


_ADVICE = "choose another file, or delete it and it is made anew"
