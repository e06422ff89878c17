"""The specification of `router`, token by token in float64 numpy; used by tests only."""

import numpy as np


def router(logits, bias, some, *, rule):
    """As `router` of the package, for numpy arrays."""
    n, experts = logits.shape
    ids = np.full((n, rule.num_experts_per_tok), experts)
    weights = np.full(ids.shape, np.nan)
    for t in np.flatnonzero(np.ones(n) if some is None else some):
        scores = scored(np.asarray(logits[t], np.float64), rule)
        choice = scores if bias is None else scores + np.asarray(bias, np.float64)
        order = np.argsort(-choice, kind="stable")
        ids[t] = order[np.isin(order, open_experts(choice, rule, 1 if bias is None else 2))][
            : rule.num_experts_per_tok
        ]
        weights[t] = scores[ids[t]] * rule.scale
        if rule.norm_topk_prob:
            weights[t] /= scores[ids[t]].sum() + 1e-20
    return ids, weights


def scored(logits, rule):
    if rule.scoring_func == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    shares = np.exp(logits - logits.max())
    return shares / shares.sum()


def open_experts(choice, rule, best):
    """The experts of the groups whose `best` experts have the largest sums."""
    members = np.arange(len(choice)).reshape(rule.n_group, -1)
    rating = np.sort(choice[members], axis=1)[:, -best:].sum(1)
    return members[np.argsort(-rating, kind="stable")[: rule.topk_group]]
