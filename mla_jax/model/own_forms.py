"""Checks of a form of attention that a user's program has registered, from shapes alone."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mla_jax.base.batch import Batch
from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, Unsupported, shown
from mla_jax.cache.paged import ASIDE
from mla_jax.model import mla
from mla_jax.model.block_attention import StepCache

SAMPLE_TOKENS = 3
LATENTS = ("c_kv", "k_pe")  # by which policies score tokens and pages


def check_form(name: str, config: Config, policies: Sequence[str] = ()) -> None:
    """Raises BadRequest for a form whose arrays have other shapes than the cache and the layer take, and Unsupported for
    `policies` that need latents, which the form does not cache."""
    cached, out = jax.eval_shape(lambda: _attended(name, config))
    if not isinstance(cached, dict) or not cached or not all(map(_is_of_tokens, cached.values())):
        raise BadRequest(
            f"the form {name} remembers {_shapes(cached)}",
            "expected arrays [B S ..] of B x S tokens, by name",
        )
    if taken := ASIDE & cached.keys():
        raise BadRequest(
            f"the form {name} remembers an array named {min(taken)}", "the cache has another of that name"
        )
    expected = (1, SAMPLE_TOKENS, config.num_attention_heads, config.v_head_dim)
    if getattr(out, "shape", None) != expected:
        raise BadRequest(f"the form {name} attends to {_shapes(out)}", f"expected [B T N V], here {expected}")
    if policies and not cached.keys() >= set(LATENTS):
        raise Unsupported(
            f"{policies[0]} does not work with the form {name}",
            f"it scores {' and '.join(LATENTS)}, and the form remembers {', '.join(cached)}",
        )


def _attended(name: str, config: Config) -> tuple[Any, Any]:
    """The form's cached arrays of some tokens, and what it gives for them."""
    form, heads = mla.FORMS[name], config.num_attention_heads
    rank, rope, nope = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim
    c_kv, k_pe, x = (jnp.zeros((1, SAMPLE_TOKENS, n)) for n in (rank, rope, config.hidden_size))
    up = jnp.zeros((heads, nope, rank)), jnp.zeros((heads, config.v_head_dim, rank))
    queries = tuple(jnp.zeros((1, SAMPLE_TOKENS, heads, n)) for n in (nope, rope))
    cached = form.remembers(c_kv, k_pe, up, x)
    if not isinstance(cached, dict):
        return cached, None
    step = form.prepare(Batch.dense(1, SAMPLE_TOKENS), None, config, SAMPLE_TOKENS)
    return cached, form.attends(queries, StepCache(cached, None, step, form.reads), up, 1.0)


def _is_of_tokens(array: Any) -> bool:
    return getattr(array, "shape", ())[:2] == (1, SAMPLE_TOKENS)


def _shapes(found: Any) -> str:
    return shown(jax.tree.map(lambda one: getattr(one, "shape", one), found))
