"""mla-jax: DeepSeek-style models with multi-head latent attention, in JAX.

from mla_jax import LLM
LLM("./DeepSeek-V2-Lite").generate("Explain MLA in one line.")
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mla_jax.base.config import Config
    from mla_jax.base.errors import (
        BadConfig,
        BadFile,
        BadRequest,
        BadTemplate,
        DoesNotFit,
        MlaJaxError,
        Overloaded,
        ProcessLost,
        TooLong,
        Unsupported,
    )
    from mla_jax.base.grammar import Grammar
    from mla_jax.base.logits_processor import LogitsProcessor
    from mla_jax.base.options import Evict, Options, SamplingParams
    from mla_jax.engine.async_llm import AsyncLLM
    from mla_jax.engine.core.compressed import CompressedContext
    from mla_jax.engine.core.request import Chunk, FinishReason, Output
    from mla_jax.engine.llm import LLM
    from mla_jax.model.transformer import Transformer
    from mla_jax.weights.download import download

_HOME = {  # of each public name: imported when it is used, so that `--help`, errors and options need no JAX
    "Config": "mla_jax.base.config",
    "BadConfig": "mla_jax.base.errors",
    "BadFile": "mla_jax.base.errors",
    "BadRequest": "mla_jax.base.errors",
    "BadTemplate": "mla_jax.base.errors",
    "DoesNotFit": "mla_jax.base.errors",
    "MlaJaxError": "mla_jax.base.errors",
    "Overloaded": "mla_jax.base.errors",
    "ProcessLost": "mla_jax.base.errors",
    "TooLong": "mla_jax.base.errors",
    "Unsupported": "mla_jax.base.errors",
    "Grammar": "mla_jax.base.grammar",
    "LogitsProcessor": "mla_jax.base.logits_processor",
    "Evict": "mla_jax.base.options",
    "Options": "mla_jax.base.options",
    "SamplingParams": "mla_jax.base.options",
    "AsyncLLM": "mla_jax.engine.async_llm",
    "CompressedContext": "mla_jax.engine.core.compressed",
    "LLM": "mla_jax.engine.llm",
    "Chunk": "mla_jax.engine.core.request",
    "FinishReason": "mla_jax.engine.core.request",
    "Output": "mla_jax.engine.core.request",
    "Transformer": "mla_jax.model.transformer",
    "download": "mla_jax.weights.download",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BadConfig",
    "BadFile",
    "BadRequest",
    "BadTemplate",
    "Chunk",
    "CompressedContext",
    "Config",
    "DoesNotFit",
    "Evict",
    "FinishReason",
    "Grammar",
    "LogitsProcessor",
    "MlaJaxError",
    "Options",
    "Output",
    "Overloaded",
    "ProcessLost",
    "SamplingParams",
    "TooLong",
    "Transformer",
    "Unsupported",
    "download",
]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
