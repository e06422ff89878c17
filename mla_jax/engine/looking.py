"""Captures of a forward pass as users ask for them, checked, and the memory that they take."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, shown
from mla_jax.model.capture import Capture
from mla_jax.model.transformer import Transformer

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
