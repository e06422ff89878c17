"""The fallback for any device. On a GPU few numbers are compared with each other, which takes fewer kernels than sorting."""

import jax
import jax.numpy as jnp

COMPARISONS = 1 << 22  # of one choice on a GPU at most


def router(logits, bias, some, *, rule):
    """As `router` of the package."""
    scores = jax.nn.softmax(logits) if rule.scoring_func == "softmax" else jax.nn.sigmoid(logits)
    # without a bias logits are in the same order, and need not wait for the scores
    choice = logits if bias is None else scores + bias
    ids = largest(within_groups(choice, rule, 1 if bias is None else 2), rule.num_experts_per_tok)
    weights = weighed(jnp.take_along_axis(scores, ids, axis=-1), rule)
    return (ids if some is None else jnp.where(some[:, None], ids, logits.shape[1])), weights


def weighed(chosen, rule):
    """The weights of experts of these scores, `[n K]`."""
    if rule.norm_topk_prob:
        chosen = chosen / (chosen.sum(-1, keepdims=True) + 1e-20)
    return chosen if rule.scale == 1 else chosen * rule.scale


def within_groups(choice, rule, best):
    """`[n X]` with -inf for experts outside the groups whose `best` experts have the largest sums."""
    if rule.topk_group == rule.n_group:
        return choice
    members = choice.reshape(-1, rule.n_group, choice.shape[-1] // rule.n_group)
    rating = members.max(-1) if best == 1 or members.shape[-1] == 1 else best_two(members)
    is_open = ranks(rating) < rule.topk_group
    return jnp.where(is_open[:, :, None], members, -jnp.inf).reshape(choice.shape)


def best_two(x):
    """The sum of the two largest numbers of the last axis."""

    def by_sorting(x):
        return jax.lax.top_k(x, 2)[0].sum(-1)

    return jax.lax.platform_dependent(x, cuda=by_adding, default=by_sorting)


def by_adding(x):
    """`best_two`, as the largest sum of two: one kernel on a GPU, where sorting is two."""
    is_itself = jnp.eye(x.shape[-1], dtype=bool)
    return jnp.where(is_itself, -jnp.inf, x[..., :, None] + x[..., None, :]).max((-2, -1))


def ranks(x):
    """How many numbers of the last axis come before each from the largest on, of equals the first before the next."""
    i = jnp.arange(x.shape[-1])
    mine, other = x[..., :, None], x[..., None, :]
    return ((other > mine) | ((other == mine) & (i < i[:, None]))).sum(-1)


def largest(x, k):
    """Where the k largest numbers of each row of `[n X]` are, of equals the first before the next."""

    def by_sorting(x):
        return jax.lax.top_k(x, k)[1]

    if x.size * x.shape[1] > COMPARISONS:
        return by_sorting(x)
    return jax.lax.platform_dependent(x, cuda=lambda x: by_comparing(x, k), default=by_sorting)


def by_comparing(x, k):
    """`largest`, by each number's rank: two kernels on a GPU, where sorting is three and slower ones."""
    i, rank = jnp.arange(x.shape[1]), ranks(x)
    return jnp.where(rank[:, None] == jnp.arange(k)[:, None], i, x.shape[1] - 1).min(-1)
