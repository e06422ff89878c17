"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): a layer that predicts one token further than the model.

It joins the embedding of token t + 1 with the main model's hidden state of t, taken after the final norm, and runs one block of
its own. Embedding and head are the main model's."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mla_jax.base.batch import Batch
from mla_jax.base.config import Config
from mla_jax.cache.paged import Layer
from mla_jax.model.kernels import linear
from mla_jax.model.ops import norm_weight, parameter, rms_norm


class MTP(nnx.Module):
    """One further token's layer around a `block` of the model's own kind."""

    def __init__(self, config: Config, rngs: nnx.Rngs, block: nnx.Module):
        self.eps = config.rms_norm_eps
        self.enorm = norm_weight(config, rngs, "model")
        self.hnorm = norm_weight(config, rngs, "model")
        self.eh_proj = parameter(config, rngs, "model", "model_pair")
        self.block = block
        self.norm = norm_weight(config, rngs, "model")

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        batch: Batch,
        layer: Layer | None,
        plan: tuple,
    ) -> tuple[Float[Array, "B T D"], Layer | None, dict[str, Array]]:
        """The normed hidden state, the layer's cache, and what its block has found."""
        with jax.named_scope("mtp"):
            joined = [
                rms_norm(embedded, self.enorm[...], self.eps),
                rms_norm(hidden, self.hnorm[...], self.eps),
            ]
            (x, _, _), layer, found = self.block(
                linear(jnp.concatenate(joined, -1), self.eh_proj[...]), None, batch, layer, plan
            )
            return rms_norm(x, self.norm[...], self.eps), layer, found
