"""Ada-KV's theorems on the attention of a trained model, and whether what the output changes by follows its bound."""

from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import retrieved

from mla_jax import LLM
from mla_jax.cache import evict
from mla_jax.cache.evict import BUDGET_RULES, Ada
from mla_jax.model import rope

TOKENS, SHARE = 320, 0.15  # of a text, and of these kept
NEWEST = range(240, TOKENS, 8)  # tokens whose attention is looked at


class Seen(NamedTuple):
    """One token's attention to the `S` tokens up to it."""

    weights: np.ndarray  # [L N S]
    values: np.ndarray  # [L N S D]: times W_o


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    llm = LLM(dtype="float32", context=TOKENS, draft="off")
    model, tokens = llm.model, llm.tokenizer.encode(Path(evict.__file__).read_text())[:TOKENS]
    _, layers = retrieved.forward(model, tokens, lambda *_: np.tri(TOKENS, dtype=bool))
    scale, rank = rope.softmax_scale(model.config), model.config.kv_lora_rank
    values = []
    for block, (_, kv) in zip(model.layers, layers, strict=True):
        up, out = (np.asarray(weight[...], np.float64) for weight in (block.attn.uv, block.attn.o_proj))
        by_head = out.reshape(out.shape[0], len(up), -1)
        values.append(np.einsum("sr,nvr,dnv->nsd", kv[:, :rank], up, by_head, optimize=True))
    seen_by = {at: [weights(q[at], kv[: at + 1], scale) for q, kv in layers] for at in NEWEST}
    return [Seen(np.stack(found), np.stack(values)[:, :, : at + 1]) for at, found in seen_by.items()]


def weights(q: np.ndarray, kv: np.ndarray, scale: float) -> np.ndarray:
    logits = q @ kv.T * scale
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def keeps(scores: np.ndarray, rule: evict.Budget) -> np.ndarray:
    """`[L H S]`, of scores `[L H S]`."""
    layers, _, slots = scores.shape
    held, count = jnp.full((layers, 1, 1), slots), jnp.array([round(SHARE * slots)])
    return np.asarray(evict.kept(jnp.asarray(scores, jnp.float32)[:, None], held, count, rule, sinks=0, window=1)[:, 0])


def change_and_bound(one: Seen, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`[L]`: the L1 norm of the change of each layer's output, and the bound of theorem 3.1."""
    left = (one.weights * kept).sum(-1)
    after = one.weights * kept / left[..., None]
    change = np.abs(np.einsum("lns,lnsd->ld", one.weights - after, one.values, optimize=True)).sum(-1)
    return change, 2 * largest(one) * (1 - left).sum(-1)


def largest(one: Seen) -> np.ndarray:
    """`[L]`: the L1 norm of the largest value times W_o, the theorem's C."""
    return np.abs(one.values).sum(-1).max((1, 2))


@pytest.mark.deep
@pytest.mark.parametrize(("shares", "most"), [("heads", 0.95), ("layers", 1.05)])
def test_the_bound_holds_and_adas_is_lower_than_the_uniform_one(seen, shares, most):
    """Over the heads of each layer the change falls with the bound. Over layers whose heads share tokens the bound falls alone: a
    layer's bound is far above its change, by a factor of its own. Changes are relative to a layer's largest value."""
    changes = {"uniform": [], "ada": []}
    for one in seen:
        scores = one.weights if shares == "heads" else one.weights.mean(1, keepdims=True)
        lost = {}
        for name, rule in (("uniform", BUDGET_RULES["uniform"]), ("ada", Ada(1.0))):
            kept = keeps(scores, rule)
            change, bound = change_and_bound(one, kept)
            assert (change <= bound + 1e-9).all()
            lost[name] = 1 - (one.weights * kept).sum(-1)
            changes[name].append((change / largest(one)).sum())
        if shares == "heads":
            assert (lost["ada"].sum(1) <= lost["uniform"].sum(1) + 1e-6).all(), "a layer's bound is higher"
        assert lost["ada"].sum() <= lost["uniform"].sum() + 1e-6
    uniform, ada = np.array(changes["uniform"]), np.array(changes["ada"])
    assert ada.mean() < most * uniform.mean()
