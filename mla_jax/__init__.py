"""mla-jax: DeepSeek-style models with multi-head latent attention, in JAX.

from mla_jax import LLM
LLM("./DeepSeek-V2-Lite").generate("Explain MLA in one line.")
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mla_jax.base.config import Config
    from mla_jax.base.options import SamplingParams
    from mla_jax.engine.llm import LLM
    from mla_jax.model.transformer import Transformer

_PUBLIC = {
    "Config": "mla_jax.base.config",
    "SamplingParams": "mla_jax.base.options",
    "LLM": "mla_jax.engine.llm",
    "Transformer": "mla_jax.model.transformer",
}
__all__ = ["LLM", "Config", "SamplingParams", "Transformer"]


def __getattr__(name: str):  # lazy: `--help` and config errors need no JAX
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
