"""A small model with its experts on the CPU or on the device, for tests of both."""

import jax
import jax.numpy as jnp
import models
import numpy as np
from flax import nnx

from mla_jax import Config, Transformer
from mla_jax.decode.loop import logits
from mla_jax.decode.model_weights import Weights
from mla_jax.decode.programs import Program
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.moe import MoE
from mla_jax.offload.experts import HostExperts
from mla_jax.offload.pack import pack_experts

CONFIG = Config.from_hf({**models.FAMILIES["v3"], "first_k_dense_replace": 1, "num_hidden_layers": 4})
ROWS = 0.02  # of the largest value: rows are rounded to bfloat16 twice, weights once


def model_of(defer: int = 0, host: bool = True) -> Transformer:
    """Its experts' weights are bfloat16's, so that the host has the same."""
    model = Transformer(CONFIG, nnx.Rngs(0), dispatch=Dispatch(experts="dense", defer=defer))
    for block in model.layers:
        if isinstance(block.mlp, MoE):
            for w in (block.mlp.experts.gate, block.mlp.experts.up, block.mlp.experts.down):
                w.set_value((10 * w[...]).astype(jnp.bfloat16).astype(jnp.float32))
            block.mlp.router.bias.set_value(0.2 * jax.random.normal(jax.random.key(0), block.mlp.router.bias.shape))
            if host:
                offload(block.mlp)
    return model


def logits_of(model: Transformer, tokens: jax.Array) -> np.ndarray:
    return np.asarray(Program(logits, Weights(model))(tokens))  # waited for: a program does not keep the experts that it calls


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=ROWS * np.abs(expected).max())


def least_last(ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A token's experts by their weights; routers sort them with their bias, too."""
    ids, weights = np.asarray(ids), np.asarray(weights)
    order = [sorted(range(len(row)), key=lambda k: -row[k]) for row in weights]
    return tuple(jnp.asarray([row[list(o)] for row, o in zip(a, order, strict=True)]) for a in (ids, weights))


def offload(layer: MoE) -> None:
    """Moves a layer's routed experts from the device to the host."""
    experts = layer.experts
    layer.experts = HostExperts(pack_experts(experts.gate[...], experts.up[...], experts.down[...]))
