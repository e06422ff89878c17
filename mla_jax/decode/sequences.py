"""Passes over whole sequences, with nothing cached: logits and captures."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.base.axes import DATA, TENSOR
from mla_jax.base.batch import Batch
from mla_jax.mesh import across
from mla_jax.model.capture import Capture
from mla_jax.model.transformer import Transformer


def logits(model: Transformer, tokens: Int[Array, "B T"]) -> Float[Array, "R T W"]:
    """Those of the sequences; on a mesh of those of all data shards."""
    return across.gathered(model.unembed(model(tokens, Batch.dense(*tokens.shape))[0]), DATA)


def captured(model: Transformer, capture: Capture, tokens: Int[Array, "B T"]) -> dict[str, Array]:
    """The logits `[B T W]` and captures by name, with layers in front; on a mesh of all data shards."""
    hidden, _, layers = model(tokens, Batch.dense(*tokens.shape), capture=capture)
    found = {name: jnp.stack(each) for name, each in layers.items()}
    if "attention" in found:
        found["attention"] = across.gathered(found["attention"], TENSOR, along=2)
    found = across.gathered(found, DATA, along=1)
    return {"logits": across.gathered(model.unembed(hidden), DATA)} | found
