"""router on a Hopper GPU, compared with XLA. Nothing but the scores is read, so there is no floor of bytes."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from ops import timing

from pallas_kernels import choice, testing
from pallas_kernels.router import CHECKS, Rule, reference, router

MODELS = {  # experts, rule
    "V2-Lite": (64, Rule(6)),
    "V2": (160, Rule(6, n_group=8, topk_group=3, scale=16.0)),
    "V3": (256, testing.V3_RULE),
    "Kimi-K2": (384, testing.V3_RULE._replace(n_group=1, topk_group=1)),
}
TOKENS = (1, 8, 64, 256, 2048)


def check() -> list[str]:
    """One line per named case; the choices are the specification's, and the error may be twice the fallback's."""
    return [_check(case) for case in testing.ROUTER]


def _check(case: testing.RouterCase) -> str:
    inputs = testing.router_inputs(case)
    title = f"router, {case.name}"
    if reason := choice.why_not("mosaic_gpu", CHECKS, inputs["logits"]):
        return f"ok   {title}: refused, {reason}"
    wanted = reference.router(**inputs, rule=case.rule)
    off, own = (
        testing.router_error(router(**inputs, rule=case.rule, impl=impl), wanted, inputs)
        for impl in ("mosaic_gpu", "xla")
    )
    return f"{'ok  ' if off <= max(2 * own, 1e-6) else 'FAIL'} {title}: {off:.7f}, fallback {own:.7f}"


def _row(model: str, tokens: int) -> dict:
    experts, rule = MODELS[model]
    keys = jax.random.split(jax.random.key(0), 2)
    logits = jax.random.normal(keys[0], (tokens, experts))
    bias = jax.random.normal(keys[1], (experts,)) if rule.scoring_func == "sigmoid" else None
    some = jnp.ones(tokens, bool)
    wanted = reference.router(np.asarray(logits), bias, some, rule=rule)[1]

    def timed(impl: str) -> timing.Work:
        call = functools.partial(router, rule=rule, impl=impl)
        # the weights come first: the next call's logits wait for them
        return timing.Work(
            lambda *given: call(*given)[::-1], [(logits, bias, some)], lambda out: testing.error(out, wanted)
        )

    (us, error), beside = timed("mosaic_gpu").measure(), timed("xla").program().microseconds()
    row = {"op": "router", "model": model, "rows": tokens, "experts": experts, "us": us}
    return row | {"XLA": beside, "error": error}


def rows(peers: dict | None = None) -> Iterator[dict]:
    """Each model by numbers of tokens; there are no `peers` of this op."""
    yield from (_row(model, tokens) for model in MODELS for tokens in TOKENS)
