"""One request's part of the cache, by token, on the host."""

import jax.numpy as jnp
import numpy as np

from mla_jax.base.errors import BadRequest, Unsupported
from mla_jax.cache import paged
from mla_jax.cache.paged import COPIED, NOTES, NOWHERE, PAGE
from mla_jax.decode.packing import here
from mla_jax.engine.core.dispatcher import Dispatcher
from mla_jax.engine.core.job import Job
from mla_jax.model import fp8_latent


def cached_tokens(job: Job, device: Dispatcher) -> dict[str, np.ndarray]:
    """Each array of the cache as `[L T ..]`, in float32; to be called on the engine's thread.

    Pages are copied from the pool a few at a time, after the dispatches under way."""
    programs = device.programs
    if programs.spread.mesh is not None:
        raise Unsupported("the cache of a request on a mesh", "take one device")
    if programs.evicts is not None:
        raise Unsupported(
            "the cache of a request whose tokens are dropped", "LLM.compress gives what is kept"
        )
    if job.held is None:
        raise BadRequest("nothing is cached of this answer", "it waits, or is done")
    tokens = min(job.held_tokens, len(job.tokens) - 1)
    pages = job.held.pages[: -(-tokens // PAGE)]
    blocks = []
    for first in range(0, len(pages), COPIED):
        some = pages[first : first + COPIED]
        pool, rows = device.state()
        places = np.full(COPIED, NOWHERE, np.int32)
        places[: len(some)] = some
        pool, contents = programs.copy_out(pool, places)
        device.keep(pool, rows)
        blocks.append(
            {name: here(array)[: len(some)] for name, array in contents.items() if name not in NOTES}
        )
    layers = programs.model.config.num_hidden_layers
    whole = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    return _as_numbers({name: _by_token(array)[:layers, :tokens] for name, array in whole.items()})


def _by_token(pages: np.ndarray) -> np.ndarray:
    """Whole pages `[K L Z ..]` as tokens `[L K*Z ..]`."""
    layers = np.swapaxes(pages, 0, 1)
    return layers.reshape(layers.shape[0], -1, *layers.shape[3:])


def _as_numbers(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The stored arrays in float32; latents in FP8 with their scales as one array."""
    cached = paged.numbers({name: jnp.asarray(array) for name, array in arrays.items()})
    if fp8_latent.SCALES in cached:
        cached = cached | fp8_latent.unpacked_latent(cached)
        del cached[fp8_latent.SCALES]
    return {name: np.asarray(array.astype(jnp.float32)) for name, array in cached.items()}
