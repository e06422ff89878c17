"""Distances that end at the edge of a local window (InfLLM, arXiv 2402.04617): tokens farther back are all as far as the edge.

RoPE knows no other distances then, so a model meets none that it was not trained for, whatever the length of the text. Rotary
keys are cached unturned. Those within the window are turned to their places; for all others the query is turned by the window."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mla_jax.base.batch import Batch
from mla_jax.base.config import Config
from mla_jax.cache.paged import Pool
from mla_jax.model import block_attention, rope
from mla_jax.model.block_attention import Blocks, Cached, Scored, StepCache
from mla_jax.model.fp8_up import Up, from_latent, to_latent
from mla_jax.model.mla import Form, Queries


def windowed(form: Form, window: int, config: Config) -> Form:
    """`form`, over unturned latents, with distances up to `window`. The arithmetic is that of move_elided."""
    attends = functools.partial(attended, window=window, config=config)
    return form._replace(attends=attends, prepare=prepare_places)


class Uncached(NamedTuple):
    """The step of tokens that attend to each other alone."""

    seen: Bool[Array, "B T 1 S"]
    positions: Int[Array, "B T"]


def prepare_places(batch: Batch, pool: Pool | None, config: Config, block: int) -> Blocks | Uncached:
    step = block_attention.prepare(batch, pool, config, block)
    return step if isinstance(step, Blocks) else Uncached(step, batch.positions)


def attended(
    q: Queries, held: StepCache, up: Up, scale: float, *, window: int, config: Config
) -> Float[Array, "B T N V"]:
    """A score is that of the two turned by their distance, or by the window if that is less.

    Of pages that were left out nobody needs to know: they are farther back than the window, as are all before them."""
    q_c, index = to_latent(q[0], up[0]), _index(held.step)
    near = turned(q[1], index, config)
    far = turned(q[1], jnp.full_like(index, window), config)

    def block(cached: Cached, first: Array | int) -> Scored:
        keys = cached["k_pe"]
        place = _places(held.step, first, keys.shape[1])
        is_near = index[:, :, None] - place[:, None] <= window
        scores = jnp.where(
            is_near[:, :, None],
            _product(near, turned(keys, jnp.broadcast_to(place, keys.shape[:2]), config)),
            _product(far, keys),
        )
        return (scores + _product(q_c, cached["c_kv"])) * scale, cached["c_kv"]

    plain = held._replace(step=held.step.seen) if isinstance(held.step, Uncached) else held
    return from_latent(plain.attend_by_slot(block), up[1], q_c.dtype)


def turned(
    x: Float[Array, "B T *H E"], positions: Int[Array, "B T"], config: Config
) -> Float[Array, "B T *H E"]:
    return rope.rotate(x, rope.angles(positions, config), config.rope_interleave)


def _index(step: Any) -> Int[Array, "B T"]:
    """Of each new token in its row."""
    return step.positions if isinstance(step, Uncached) else step.rows.index


def _places(step: Any, first: Array | int, slots: int) -> Int[Array, "#B S"]:
    """Of each slot of a block in its row."""
    return step.positions if isinstance(step, Uncached) else step.index_of(first, slots)


def _product(q: Float[Array, "B T N H"], keys: Float[Array, "B S H"]) -> Float[Array, "B T N S"]:
    return jnp.einsum("btnh,bsh->btns", q, keys, preferred_element_type=jnp.float32)
