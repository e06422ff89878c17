"""Predicted rates of a mesh with a checkpoint that is opened but not loaded, in words and as figures."""

from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import jax

from mla_jax.base import qtensor
from mla_jax.base.axes import DATA
from mla_jax.base.qtensor import REORDERED, QTensor
from mla_jax.cache.paged import PAGE
from mla_jax.mesh.cost import HELD, PREDICTED_ROWS, MeshCost, PackedWeights, Predicted, about
from mla_jax.mesh.devices import Devices
from mla_jax.weights.load import Checkpoint


@dataclass(frozen=True)
class Prediction:
    """Of a step of `rows` rows of all data shards together that hold `held` tokens each, and of prompts of that length."""

    rows: int
    held: int
    decode: Predicted
    prompts: Predicted

    def lines(self) -> list[str]:
        step = (
            f"{about(self.decode.tokens)} tokens/s of all devices at batch {self.rows:,} x {self.held:,} held"
        )
        prompts = f"prompts {about(self.prompts.tokens)} tokens/s"
        messages = f"communication {100 * self.decode.share:.0f} % of the step"
        exchanges = f"{self.decode.exchange} in a step, {self.prompts.exchange} in prompts"
        return [f"predicted: {step}, {prompts}; {messages}", f"exchange of tokens with experts: {exchanges}"]

    def fields(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "rows": self.rows,
            "held": self.held,
            "tokens_per_second": self.decode.tokens,
            "prompt_tokens_per_second": self.prompts.tokens,
            "communication": self.decode.share,
            "exchange": self.decode.exchange,
            "prompt_exchange": self.prompts.exchange,
        }


def predict(
    checkpoint: Checkpoint, devices: Devices, available: int, batch: int = 1, context: int | None = None
) -> Prediction:
    """For `batch` sequences of `context` tokens on the mesh of these devices, which have all experts.

    By default as many rows as usual and as fit in `available` bytes of each device."""
    cost = cost_of(checkpoint, devices)
    held = min(context or HELD, checkpoint.config.max_position_embeddings)
    shards = cost.of(DATA)
    rows = ceil(batch / shards) if batch > 1 else max(1, min(PREDICTED_ROWS, cost.tokens(available) // held))
    return Prediction(rows * shards, held, cost.decode(rows, held), cost.prompts(held))


def cost_of(checkpoint: Checkpoint, devices: Devices) -> MeshCost:
    """The cost of a checkpoint's weights, packed as they are, and of what its attention caches."""
    pool = jax.eval_shape(lambda: checkpoint.model().new_pool(1, PAGE, layers=1))
    token = ceil(sum(part.size * part.dtype.itemsize for part in pool.values()) / PAGE)
    return MeshCost(checkpoint.config, devices.sizes, devices.figures, packed_as(checkpoint), token)


def packed_as(checkpoint: Checkpoint) -> PackedWeights | None:
    """Bytes of a packed weight on average, and the block of the format that most have."""
    found = [value for value in checkpoint.parameters().values() if isinstance(value, QTensor)]
    if not found:
        return None
    numbers = sum(prod(value.shape) for value in found)
    largest = max(found, key=lambda value: prod(value.shape))
    block = qtensor.format_of(largest.format.removesuffix(REORDERED)).block
    return PackedWeights(sum(value.nbytes for value in found) / numbers, (block[0] or 1, block[1] or 1))
