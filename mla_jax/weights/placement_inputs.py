"""Inputs of the placement of a checkpoint's experts: its headers, and the memory plan with all experts on the device."""

from mla_jax.base import roofline
from mla_jax.base.limits import free_memory
from mla_jax.base.options import ExpertOptions
from mla_jax.base.qtensor import QTensor
from mla_jax.model.parts import cost_of
from mla_jax.offload.place import Figures, Placement
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.plan import memory_plan

DEFAULT_CONTEXT = (
    8192  # tokens per sequence whose cache pushes experts off the device, if the user gives no context
)
PREDICTED_TOKENS = 1024  # tokens per sequence that steps are predicted for then


def figures(
    checkpoint: Checkpoint, wanted: ExpertOptions, context: int | None = None, batch: int = 1
) -> Figures:
    """For `batch` sequences of `context` tokens."""
    longest = checkpoint.config.max_position_embeddings
    everything = memory_plan(checkpoint, context or min(DEFAULT_CONTEXT, longest), batch)
    prompt = min(roofline.STREAMED, longest)
    models = [checkpoint.model(Placement(stream=stream)) for stream in (0, 1)]
    chunks = (model.dispatch.chunk(model) for model in models)
    chunk, streamed = (min(each, prompt) for each in chunks)
    return Figures(
        cost=cost_of(models[0]),
        dtype=checkpoint.dtype,
        layers=checkpoint.expert_layers(wanted.host_precision),
        needed=everything.needed,
        available=everything.available,
        host_free=free_memory(),
        context=everything.context,
        held=context or min(PREDICTED_TOKENS, longest),
        batch=batch,
        chunk=chunk,
        streamed_chunk=streamed,
        quantized=any(isinstance(value, QTensor) for value in checkpoint.parameters().values()),
    )
