"""Who may use a compressed context: the model that made it, with the same cache and the same settings of eviction."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mla_jax.base.errors import BadRequest, Unsupported
from mla_jax.base.options import SamplingParams
from mla_jax.engine.core.compressed import CompressedContext
from mla_jax.engine.core.request import Request
from mla_jax.model.transformer import Transformer

if TYPE_CHECKING:
    from mla_jax.engine.llm import LLM

ADVICE = 'open the model with LLM(.., evict=Evict("snapkv", keep=0.1))'

HASHED = 1024  # numbers of an array that its model is known by


class Compressing:
    """For one LLM with the weights that it has now."""

    def __init__(self, llm: "LLM"):
        eviction = llm.options.eviction
        if eviction.evict == "off":
            raise BadRequest("nothing is dropped from a context without evict", ADVICE)
        if llm.plan.mesh:
            raise Unsupported(f"compressed contexts on a mesh ({llm.plan.mesh})", "take one device")
        self.inputs = llm.inputs
        model, arrays = llm.model, llm._programs.page
        self.made_by = {
            "model": _fingerprint(model),
            "cache": ", ".join(f"{name} {one.dtype}{[*one.shape]}" for name, one in sorted(arrays.items())),
            "evict": _settings(eviction),
        }

    def request(self, context: str | Sequence[int], questions: str | Sequence[int]) -> Request:
        """Of a compressed context alone."""
        tokens, asking = self.inputs.tokens(context), self.inputs.tokens(questions or [], bos=False)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        self.inputs.check_prompt(tokens, needed=2)
        return dataclasses.replace(self.inputs.request(tokens + asking, params), asking=len(asking))

    def signed(self, context: CompressedContext) -> CompressedContext:
        return dataclasses.replace(context, made_by=self.made_by)

    def check(self, context: CompressedContext) -> None:
        """Raises BadRequest for a context that this LLM would not have made."""
        for name, mine in self.made_by.items():
            if (found := context.made_by.get(name)) != mine:
                raise BadRequest(
                    f"the compressed context is of another {name}", f"found {found}", f"expected {mine}"
                )


def _settings(eviction: Any) -> str:
    """The settings of eviction as text."""
    named = (
        f"{field.name.removeprefix('evict_')}={getattr(eviction, field.name)!r}"
        for field in dataclasses.fields(eviction)
    )
    return ", ".join(named)


def _fingerprint(model: Transformer) -> str:
    """A hash of a model's sizes, and of the first numbers of each layer's norm and keys."""
    found = hashlib.sha256(repr(model.config).encode())
    for layer in model.layers:
        for array in jax.tree.leaves((layer.attn_norm.get_value(), layer.attn.uk.get_value())):
            found.update(np.asarray(array.ravel()[:HASHED]).tobytes())
    return found.hexdigest()[:32]
