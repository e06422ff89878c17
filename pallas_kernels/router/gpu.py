"""Routing on a Hopper GPU: one kernel instead of XLA's four to six.

Each of XLA's kernels costs a decode step about as much as all of this one. A block routes one token. Each of its warps has all of
the token's scores, so that no warp waits for another: a lane holds every 32nd of them, and lanes meet by shuffles alone."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

SCORES = plgpu.Layout.TILED(plgpu.Tiling(((32,), (1,))), (plgpu.Replicated(4),), (-2,), -1)


def _first(found, column):
    """The first column that is `found`, the last one of all if none is."""
    experts = column.shape[0]
    # The largest negative one: of integers the hardware has a maximum over a warp
    return -jnp.max(jnp.where(found, -column, 1 - experts))


def _without(x, column, at):
    return jnp.where(column == at, -jnp.inf, x)


def _ratings(choice, column, rule, best_of):
    """Per group the sum of its best experts."""
    each = column.shape[0] // rule.n_group
    for group in range(rule.n_group):
        inside = (column >= group * each) & (column < (group + 1) * each)
        members = jnp.where(inside, choice, -jnp.inf)
        best = jnp.max(members)
        if min(best_of, each) == 2:
            best += jnp.max(_without(members, column, _first(members == best, column)))
        yield best


def _within_groups(choice, column, rule, best_of):
    """-inf for experts outside the best groups."""
    if rule.topk_group == rule.n_group:
        return choice
    ratings, each = list(_ratings(choice, column, rule, best_of)), column.shape[0] // rule.n_group
    for group, mine in enumerate(ratings):
        before = [other >= mine for other in ratings[:group]] + [
            other > mine for other in ratings[group + 1 :]
        ]
        rank = sum(x.astype(jnp.int32) for x in before)
        most = jnp.where(rank < rule.topk_group, jnp.inf, -jnp.inf)
        inside = (column >= group * each) & (column < (group + 1) * each)
        choice = jnp.where(inside, jnp.minimum(choice, most), choice)
    return choice


def _scores(logits, rule):
    if rule.scoring_func == "sigmoid":
        return 1 / (1 + jnp.exp(-logits))
    shares = jnp.exp(logits - jnp.max(logits))
    return shares / jnp.sum(shares)


def _kernel(logits_g, *refs, rule, has_bias, has_some):
    *given, ids_g, weights_g = refs
    token, experts = lax.axis_index("token"), logits_g.shape[1]
    column = plgpu.broadcasted_iota(jnp.int32, (experts,), 0, layout=SCORES)
    logits = plgpu.load(logits_g.at[token], layout=SCORES, optimized=False)
    scores = _scores(logits, rule)
    choice = scores + plgpu.load(given[0], layout=SCORES, optimized=False) if has_bias else logits
    choice = _within_groups(choice, column, rule, 2 if has_bias else 1)
    chosen = []
    for k in range(rule.num_experts_per_tok):
        at = _first(choice == jnp.max(choice), column)
        choice = _without(choice, column, at)
        ids_g[token, k] = jnp.where(given[-1][token] != 0, at, experts) if has_some else at
        chosen.append(jnp.sum(jnp.where(column == at, scores, 0.0)))
    factor = rule.scale / (sum(chosen) + 1e-20) if rule.norm_topk_prob else rule.scale
    for k, score in enumerate(chosen):
        weights_g[token, k] = score * factor


# Jitted, so that all layers of a model are lowered once
@functools.partial(jax.jit, static_argnames=("rule", "interpret"))
def router(logits, bias, some, *, rule, interpret=None):
    """As `router` of the package; `interpret` runs the kernel on a CPU."""
    shape = logits.shape[0], rule.num_experts_per_tok
    given = [] if bias is None else [bias]
    given += [] if some is None else [some.astype(jnp.int32)]
    return plgpu.kernel(
        functools.partial(_kernel, rule=rule, has_bias=bias is not None, has_some=some is not None),
        out_type=(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        grid=logits.shape[:1],
        grid_names=("token",),
        interpret=interpret,
    )(logits, *given)
