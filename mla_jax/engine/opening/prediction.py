"""Predicted rates of a mesh with a checkpoint that is opened but not loaded, in words and as figures."""

from dataclasses import dataclass
from math import ceil
from typing import Any

from mla_jax.base.axes import DATA
from mla_jax.mesh.cost import HELD, PREDICTED_ROWS, Predicted, about
from mla_jax.model.parts import cost_of
from mla_jax.model.transformer import Transformer
from mla_jax.weights.plan import MemoryPlan


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
    model: Transformer, planned: MemoryPlan, batch: int = 1, context: int | None = None
) -> Prediction:
    """For `batch` sequences of `context` tokens on the mesh of a model that has all experts on its devices.

    By default as many rows as usual and as the planned cache holds."""
    cost = cost_of(model)
    held = min(context or HELD, model.config.max_position_embeddings)
    shards = cost.of(DATA)
    rows = ceil(batch / shards) if batch > 1 else max(1, min(PREDICTED_ROWS, planned.tokens // held))
    return Prediction(rows * shards, held, cost.decode(rows, held), cost.prompts(held))
