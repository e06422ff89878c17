"""Who may use a compressed context: the model that made it, with the same cache and the same settings of eviction."""

import dataclasses
import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mla_jax.base.errors import BadRequest, Unsupported, shown
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
        self._llm, self._arrays = llm, llm._programs.page
        self._shape = llm.config.num_hidden_layers, llm.model.lanes
        described = (f"{name} {one.dtype}{[*one.shape]}" for name, one in sorted(self._arrays.items()))
        self.made_by = {
            "model": _fingerprint(llm.model),
            "cache": ", ".join(described),
            "evict": _settings(eviction),
        }

    def made(self, context: str | Sequence[int], questions: str | Sequence[int]) -> CompressedContext:
        """Reads a context; see `LLM.compress`."""
        llm, done = self._llm, threading.Event()
        (reader,) = llm.submit([self._request(context, questions)], lambda _: done.set())
        try:
            done.wait()  # nothing else is told of a request that chooses no token
            reader.read()
        finally:
            llm.cancel([reader])
        if reader.job.compressed is None:
            raise BadRequest("the context was not read to its end", f"it ended with {reader.reason}")
        return dataclasses.replace(reader.job.compressed, made_by=self.made_by)

    def _request(self, context: str | Sequence[int], questions: str | Sequence[int]) -> Request:
        """Of a compressed context alone."""
        inputs = self._llm.inputs
        tokens, asking = inputs.tokens(context), inputs.tokens(questions or [], bos=False)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        inputs.check_prompt(tokens, needed=2)
        return dataclasses.replace(inputs.request(tokens + asking, params), asking=len(asking))

    def check(self, context: Any) -> None:
        """Raises BadRequest for what is no context that this LLM would have made."""
        if not isinstance(context, CompressedContext):
            raise BadRequest(f"context is {shown(context)}", "compress and open_context give one")
        for name, mine in self.made_by.items():
            if (found := context.made_by.get(name)) != mine:
                raise BadRequest(
                    f"the compressed context is of another {name}", f"found {found}", f"expected {mine}"
                )
        if context.counts.shape != self._shape or not self._are_cached(context.arrays):
            raise BadRequest("the compressed context's arrays are not those of this model's cache")

    def _are_cached(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Whether these are the cache's arrays, with their dtypes and what one token has in them."""
        if arrays.keys() != self._arrays.keys():
            return False
        before = (
            2 if self._shape[1] == 1 else 3
        )  # axes of a page: layers, tokens, and heads if these are cached
        expected = ((name, one.dtype, one.shape[before:]) for name, one in self._arrays.items())
        return all(
            arrays[name].dtype == dtype and arrays[name].shape[1:] == shape for name, dtype, shape in expected
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
