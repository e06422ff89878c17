"""Passes over whole sequences as users ask for them, checked, with the memory that they take; and the cache of an answer."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, DoesNotFit, shown
from mla_jax.base.limits import gib
from mla_jax.engine.cached_tokens import cached_tokens
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.job import Job
from mla_jax.model.capture import Capture
from mla_jax.model.transformer import Transformer
from mla_jax.weights.temporaries import logits_bytes

if TYPE_CHECKING:
    from mla_jax.engine.llm import LLM

FLOAT32 = 4  # bytes


def capture_of(
    config: Config,
    hidden: Sequence[int],
    lens: Sequence[int],
    attention: Sequence[int],
    router: bool,
    cache: bool,
) -> Capture:
    """The capture of these layers. Raises BadRequest for numbers that no layer of this model has."""
    last = config.num_hidden_layers
    return Capture(
        _layers("hidden", hidden, last),
        _layers("lens", lens, last),
        _layers("attention", attention, last - 1),
        router,
        cache,
    )


def captured_bytes(model: Transformer, capture: Capture, rows: int, tokens: int) -> int:
    """Bytes of a capture on the device, for `rows` sequences of `tokens` tokens."""
    config, every = model.config, rows * tokens
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    widths = model.dtype.itemsize * (
        len(capture.hidden) * config.hidden_size + capture.cache * config.num_hidden_layers * latent
    )
    words = FLOAT32 * len(capture.lens) * config.vocab_size
    weights = FLOAT32 * len(capture.attention) * config.num_attention_heads * tokens
    routes = 2 * FLOAT32 * capture.router * config.num_hidden_layers * (config.num_experts_per_tok or 0)
    return every * (2 * widths + 2 * words + 2 * weights + routes)  # each once more while layers are stacked


def logits_for(llm: "LLM", tokens: Any) -> np.ndarray:
    """See `LLM.logits`."""
    llm._refresh()
    array = _refuse_too_many(llm, tokens, Capture())
    return llm._worker.call(partial(_logits, llm, array))


def forward_for(llm: "LLM", tokens: Any, capture: Capture) -> dict[str, np.ndarray]:
    """See `LLM.forward`."""
    llm._refresh()
    array = _refuse_too_many(llm, tokens, capture)
    return llm._worker.call(partial(_captured, llm, array, capture))


def cache_of(llm: "LLM", job: Job) -> dict[str, np.ndarray]:
    """See `Stream.cache`."""
    llm._refuse_several("the cache of a request", "take one process")
    assert isinstance(llm.engine, Engine)
    return llm._worker.call(partial(cached_tokens, job, llm.engine.device))


def _refuse_too_many(llm: "LLM", tokens: Any, capture: Capture) -> np.ndarray:
    """The tokens as an array `[B T]`; raises DoesNotFit before their logits and captures take any memory."""
    array = np.asarray(llm.inputs.token_block(tokens), np.int32)
    rows, length = array.shape
    needed = logits_bytes(llm.model, rows, length) + captured_bytes(llm.model, capture, rows, length)
    room = llm.plan.available - llm.plan.weights
    if needed > room:
        raise DoesNotFit(
            f"the logits of {rows:,} x {length:,} tokens do not fit",
            f"they and their activations take about {gib(needed)}; the weights leave room for {gib(room)}",
            "give fewer or shorter sequences per call",
        )
    return array


def _logits(llm: "LLM", tokens: np.ndarray) -> np.ndarray:
    with llm._memory_explained():
        found = llm.engine.logits(tokens)
    llm._programs.check()
    return found


def _captured(llm: "LLM", tokens: np.ndarray, capture: Capture) -> dict[str, np.ndarray]:
    with llm._memory_explained():
        found = llm._programs.captured_of(tokens, capture)
    llm._programs.check()
    return found


def _layers(name: str, asked: Any, last: int) -> tuple[int, ...]:
    """Numbers of layers up to `last`."""
    numbers = [asked] if isinstance(asked, int | np.integer) else asked
    try:
        found = tuple(int(number) for number in numbers)
    except (TypeError, ValueError) as e:
        raise BadRequest(f"{name} is {shown(asked)}, expected numbers of layers") from e
    wrong = [number for number in found if not 0 <= number <= last]
    if wrong:
        raise BadRequest(f"{name} names layer {wrong[0]}, expected 0 to {last}")
    return found
