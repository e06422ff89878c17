"""The lightning indexer and the choice of tokens: against their definition in plain numpy, in blocks, in lines, and in memory."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import retrieved
from flax import nnx

from mla_jax.base import roofline
from mla_jax.base.batch import Batch
from mla_jax.base.config import Config
from mla_jax.base.roofline import ChoiceSizes
from mla_jax.cache import paged
from mla_jax.cache.paged import INDEX_K, Layer
from mla_jax.model import rope
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.indexer import IndexQueries
from mla_jax.model.token_choice import MaskChoice, choice_of_step
from mla_jax.weights.load import load

GOLDEN = Path(__file__).parents[1] / "golden"
CONFIG = Config.from_hf({**models.FAMILIES["v32"], "index_topk": 7})
J, WIDTH, SIZE = 5, 4, 4  # heads of the indexer, numbers of one, tokens of a page
LENS, NEW = [23, 1, 40], [23, 1, 9]  # tokens of each row, and the new ones among them
RNG = np.random.default_rng(0)
KEYS = [RNG.standard_normal((n, WIDTH)).astype(np.float32) for n in LENS]
Q = [RNG.standard_normal((n, J, WIDTH)).astype(np.float32) for n in NEW]
WEIGHTS = [RNG.standard_normal((n, J)).astype(np.float32) for n in NEW]


def defined(row: int, count: int = 7) -> list[list[int]]:
    """The tokens that each new one of a row chooses: of those up to itself, the ones with the highest scores."""
    found = []
    for i, (q, w) in enumerate(zip(Q[row], WEIGHTS[row], strict=True)):
        seen = KEYS[row][: LENS[row] - NEW[row] + i + 1].astype(np.float64)
        scores = (np.maximum(q.astype(np.float64) @ seen.T, 0) * w[:, None]).sum(0)
        found.append(sorted(np.argsort(-scores, kind="stable")[:count].tolist()))
    return found


def scattered_pool(poison: float) -> tuple[dict, np.ndarray]:
    """The second of two layers' keys in pages here and there; the rest is poisoned."""
    width = max(-(-n // SIZE) for n in LENS)
    table = np.random.default_rng(1).permutation(3 * width)[: 3 * width].reshape(3, width).astype(np.int32)
    keys = np.full((2 * 3 * width, SIZE, WIDTH), poison, np.float32)
    for row, mine in enumerate(KEYS):
        for i, key in enumerate(mine):
            keys[3 * width + table[row, i // SIZE], i % SIZE] = key
    pool = {"c_kv": jnp.zeros((2 * 3 * width, SIZE, 1)), INDEX_K: jnp.asarray(keys)}
    return pool, table


def padded(parts: list[np.ndarray], lines: bool) -> jax.Array:
    """Each row's in a line of its own, or all in one line, one behind the other, with padding behind."""
    if lines:
        joined = np.concatenate(parts)
        return jnp.asarray(np.concatenate([joined, np.zeros((3, *joined.shape[1:]), joined.dtype)])[None])
    most = max(map(len, parts))
    return jnp.asarray(np.stack([np.pad(p, [(0, most - len(p)), *[(0, 0)] * (p.ndim - 1)]) for p in parts]))


@pytest.mark.parametrize("line", [False, True], ids=["rows", "line"])
@pytest.mark.parametrize("sizes", [(4, 1), (8, 5), (1024, 1024)], ids=str)
def test_the_choice_is_that_of_the_definition(line, sizes):
    """However many slots are scored at a time and for however many tokens, of rows with fewer tokens than are chosen, too."""
    pool, table = scattered_pool(np.nan)
    held, counts = (jnp.asarray(x, jnp.int32) for x in (np.subtract(LENS, NEW), NEW))
    make = Batch.in_line if line else Batch.behind
    batch = make(held, held, counts, sum(NEW) + 3 if line else max(NEW), jnp.asarray(table))
    plan = choice_of_step(batch, pool, CONFIG, ChoiceSizes(*sizes, 1))
    layer = Layer(pool, jnp.int32(0), jnp.int32(pool[INDEX_K].shape[0] // 2))
    queries = IndexQueries(padded(Q, line), padded(WEIGHTS, line))
    slots, how_many = jax.jit(lambda q, layer: plan.chosen(q, q.q[:, :, 0], layer))(queries, layer)
    page_of = {int(page): (row, at * SIZE) for row in range(3) for at, page in enumerate(table[row])}
    place = {page * SIZE + z: (row, first + z) for page, (row, first) in page_of.items() for z in range(SIZE)}
    for row in range(3):
        for i, wanted in enumerate(defined(row)):
            at = (0, sum(NEW[:row]) + i) if line else (row, i)
            found = [place[int(slot)] for slot in slots[at][: how_many[at]]]
            assert found == [(row, token) for token in wanted]
    assert not how_many.sum() - sum(len(one) for row in range(3) for one in defined(row)), "padding chooses nothing"


def test_without_a_cache_the_choice_is_a_mask_with_the_same_tokens():
    keys, row = jnp.asarray(KEYS[0][None]), 0
    mask = jnp.tri(23, dtype=bool)[None, :, None]
    queries = IndexQueries(jnp.asarray(Q[row][None]), jnp.asarray(WEIGHTS[row][None]))
    found = MaskChoice(7, mask).chosen(queries, keys, None)
    assert [np.flatnonzero(one).tolist() for one in np.asarray(found[0, :, 0])] == defined(row)


def test_of_equal_scores_the_first_tokens_are_chosen():
    keys, mask = jnp.ones((1, 12, WIDTH)), jnp.tri(12, dtype=bool)[None, :, None]
    queries = IndexQueries(jnp.ones((1, 12, J, WIDTH)), jnp.ones((1, 12, J)))
    found = np.asarray(MaskChoice(3, mask).chosen(queries, keys, None))[0, :, 0]
    assert [np.flatnonzero(one).tolist() for one in found[:5]] == [[0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]


# a model


@pytest.fixture(scope="module", params=["v32", "glm_5"])
def model(request):
    return load(GOLDEN / request.param)


def tokens_of(model, length: int = 120) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).integers(2, model.config.vocab_size, (2, length)), jnp.int32)


def logits(model, tokens: jax.Array) -> np.ndarray:
    return np.asarray(jax.jit(lambda t: model.unembed(model(t, Batch.dense(*t.shape))[0]))(tokens))


@pytest.mark.deep
def test_the_other_kind_of_rotation_shows_once_tokens_are_chosen(model):
    """A wrong one is invisible in a short text: all tokens are chosen there."""
    golden = np.load(GOLDEN / ("v32" if model.config.model_type == "deepseek_v32" else "glm_5") / "golden.npz")
    other = nnx.clone(model)
    config = dataclasses.replace(model.config, indexer_rope_interleave=not model.config.indexer_rope_interleave)
    for block in other.layers:
        if block.attn.indexer is not None:
            block.attn.indexer.config = config
    found = logits(other, jnp.asarray(golden["tokens"], jnp.int32))
    error = np.abs(found - golden["logits"]).max((0, 2)) / golden["logits"].std()
    assert error[:24].max() < 1e-4
    assert error[100:].max() > 0.1


def test_contexts_of_up_to_so_many_tokens_take_the_dense_path(model):
    """Nothing of them depends on what an indexer would choose: the results are equal to the last bit."""
    other = nnx.clone(model)
    for block in other.layers:
        if block.attn.indexer is not None:
            block.attn.indexer.wk[...] = -block.attn.indexer.wk[...]
    tokens = tokens_of(model, 24)
    np.testing.assert_array_equal(logits(model, tokens), logits(other, tokens))
    longer = tokens_of(model, 60)
    assert np.abs(logits(model, longer) - logits(other, longer)).max() > 0.1


def test_only_layers_with_an_indexer_cache_keys(model):
    pool = model.new_pool(3)
    own = sum(block.attn.indexer is not None for block in model.blocks())
    assert own == len(model.indexed)
    assert pool[INDEX_K].shape == (3 * own, paged.PAGE, model.config.index_head_dim)
    assert pool["c_kv"].shape[0] == 3 * model.cached_layers
    firsts = [model.layer_of(pool, i).first_of_index for i in range(model.cached_layers)]
    assert [int(first) for first in firsts if first is not None] == [3 * n for n in range(own)]


@pytest.mark.deep
def test_no_gradient_flows_through_the_choice(model):
    trainable = nnx.clone(model)
    trainable.dispatch = Dispatch(experts="dense")
    graph, state = nnx.split(trainable)
    tokens = tokens_of(model, 50)

    @jax.jit
    def gradient(state):
        def loss(state):
            hidden = nnx.merge(graph, state)(tokens, Batch.dense(*tokens.shape))[0]
            return (hidden.astype(jnp.float32) ** 3).mean()

        return jax.grad(loss)(state)

    found = {".".join(map(str, path)): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(gradient(state))}
    assert all(np.isfinite(g).all() for g in found.values())
    for path, g in found.items():
        has_none = ".indexer." in path or path.endswith("router.bias") or path.startswith(("head", "mtp"))
        assert g.any() != has_none, path


@pytest.mark.deep
def test_scores_of_all_cached_tokens_are_never_in_memory_together():
    """Of a chunk of a prompt behind a long context, whose scores alone would take more than all temporaries."""
    config = dataclasses.replace(Config.preset("v3_2"), index_topk=256)
    new, pages, size = 512, 4096, 64
    sizes = roofline.choice_sizes(config, "gpu", "move_elided", 1, new, 2)._replace(slots=1024, choosing=64)
    shapes = {
        "q": jax.ShapeDtypeStruct((1, new, 64, 128), jnp.float32),
        "w": jax.ShapeDtypeStruct((1, new, 64), jnp.float32),
        "keys": jax.ShapeDtypeStruct((pages, size, 128), jnp.float32),
        "table": jax.ShapeDtypeStruct((1, pages), jnp.int32),
    }

    def choose(q, w, keys, table):
        batch = Batch.in_line(*(jnp.asarray([n], jnp.int32) for n in (pages * size - new, 0, new)), new, table)
        pool = {"c_kv": keys, INDEX_K: keys}
        plan = choice_of_step(batch, pool, config, sizes)
        return plan.chosen(IndexQueries(q, w), q[:, :, 0], Layer(pool, jnp.int32(0), jnp.int32(0)))

    compiled = jax.jit(choose).lower(*shapes.values()).compile()
    whole = 4 * new * pages * size
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 8


# costs


def test_costs_grow_with_the_chosen_tokens_and_not_with_the_context():
    config = Config.preset("v3_2")
    short, long = (roofline.attention_cost(config, "move_elided", 8, 1, n) for n in (2049, 100_000))
    assert short == long
    assert roofline.choice_cost(config, 8, 1, 2048, key=256) == (0, 0)
    found = roofline.choice_cost(config, 8, 2, 4096, key=132)
    assert found.flops == 2 * 8 * 2 * 4096 * 64 * 128
    assert found.bytes == 8 * 4096 * 132 + 8 * 8 * 2 * 4096 * 64
    dense = dataclasses.replace(config, index_topk=None)
    assert roofline.attention_cost(dense, "move_elided", 8, 1, 100_000).flops > 40 * long.flops


@pytest.mark.parametrize(("attention", "over"), [("fused", "kernel_chosen"), ("auto", "move_elided"), ("naive", "naive")])
def test_a_step_over_more_tokens_takes_a_form_that_chooses(attention, over):
    model = load(GOLDEN / "glm_5", dispatch=Dispatch(attention=attention))
    assert model.dispatch.form_name(model, 1, 1, 25) == over
    assert (model.dispatch.form_name(model, 1, 1, 24) == over) == (over != "kernel_chosen")


# long texts


def numpy_hidden(model, tokens: list[int]) -> np.ndarray:
    """`[S D]` before the last norm, by the definition: each token sees those that its layer, or one below, has chosen for it."""
    x, scale, mask = model.embedded(jnp.asarray([tokens], jnp.int32)), rope.softmax_scale(model.config), None
    for block in model.layers:
        attn, h = block.attn, retrieved.normed(x, block.attn_norm[...], block.eps)
        q, kv = retrieved.attention_of(attn, h)
        if attn.indexer is not None:
            mask = numpy_mask(attn, np.asarray(h[0], np.float64))
        values = np.empty((len(tokens), q.shape[1], model.config.v_head_dim))
        for part in np.array_split(np.arange(len(tokens)), 16):
            logits = np.where(mask[part], np.einsum("tnl,sl->nts", q[part], kv, optimize=True) * scale, -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            latents = np.einsum("nts,sr->tnr", weights, kv[:, : model.config.kv_lora_rank], optimize=True)
            values[part] = np.einsum("tnr,nvr->tnv", latents, np.asarray(attn.uv[...], np.float64))
        out = values.reshape(len(tokens), -1) @ np.asarray(attn.o_proj[...], np.float64).T
        x = x + jnp.asarray(out, jnp.float32)[None]
        x = x + retrieved.fed_forward(*nnx.split(block.mlp), retrieved.normed(x, block.mlp_norm[...], block.eps))
    return np.asarray(x[0])


def numpy_mask(attn, h: np.ndarray) -> np.ndarray:
    """The tokens that each one attends to `[T S]`, from the layer's input, in float64."""
    c, indexer = attn.config, attn.indexer
    weight = {name: np.asarray(value.get_value(), np.float64) for (name,), value in nnx.to_flat_state(nnx.state(indexer))}
    count, width, angle = len(h), c.qk_rope_head_dim, np.outer(np.arange(len(h)), rope.inverse_frequencies(c).astype(np.float64))

    def turned(x: np.ndarray) -> np.ndarray:
        first, rest = x[..., :width], x[..., width:]
        pairs = (
            (slice(0, None, 2), slice(1, None, 2)) if c.indexer_rope_interleave else (slice(width // 2), slice(width // 2, None))
        )
        a, b = (first[..., pair] for pair in pairs)
        cos, sin = (f(angle).reshape(count, *[1] * (x.ndim - 2), -1) for f in (np.cos, np.sin))
        found = np.empty_like(first)
        found[..., pairs[0]], found[..., pairs[1]] = a * cos - b * sin, a * sin + b * cos
        return np.concatenate([found, rest], -1)

    c_q = h @ np.asarray(attn.q_a_proj[...], np.float64).T
    c_q *= np.asarray(attn.q_a_norm[...], np.float64) / np.sqrt((c_q**2).mean(-1, keepdims=True) + 1e-6)
    q = turned((c_q @ weight["wq_b"].T).reshape(count, c.index_n_heads, c.index_head_dim))
    k = h @ weight["wk"].T
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
    k, w = turned(k * weight["k_norm"] + weight["k_norm_bias"]), h @ weight["weights_proj"].T
    mask = np.zeros((count, count), bool)
    for t in range(count):
        found = (np.maximum(q[t] @ k[: t + 1].T, 0) * w[t][:, None]).sum(0)
        mask[t, np.argsort(-found, kind="stable")[: c.index_topk]] = True
    return mask


@pytest.mark.deep
def test_a_text_of_thousands_of_tokens_in_chunks_is_that_of_plain_numpy(model):
    """Rows of two lengths. Rarely a token's scores at the border differ by less than float32 tells: some tokens may differ."""
    length, table = 3000, paged.in_order(2, 3000)
    tokens = np.asarray(tokens_of(model, length))
    step = jax.jit(lambda ids, batch, pool: model(ids, batch, pool)[:2])
    pool, held, found = model.new_pool(table.size), np.zeros(2, np.int32), []
    for new in (700, 1400, 850, 50):  # the second row has half of the last two
        counts = np.array([new, new // 2 if new < 900 else new], np.int32)
        counts[1] = min(counts[1], 2400 - held[1])
        at = np.minimum(held[:, None] + np.arange(new), length - 1)
        ids = jnp.asarray(np.take_along_axis(tokens, at, axis=1))
        hidden, pool = step(ids, Batch.behind(*map(jnp.asarray, (held, held, counts)), new, table), pool)
        found.append((held, counts, np.asarray(hidden)))
        held = held + counts
    for row in range(2):
        mine = np.concatenate([hidden[row, : counts[row]] for _, counts, hidden in found])
        wanted = numpy_hidden(model, tokens[row, : held[row]].tolist())
        wanted = np.asarray(retrieved.normed(jnp.asarray(wanted), model.norm[...], model.config.rms_norm_eps))
        error = np.abs(mine - wanted).max(1)
        assert len(mine) > 1500
        assert (error < 1e-3).mean() > 0.97
