"""Pages' summaries while tokens come, and a layer's attention to the chosen pages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import retrieved
from flax import nnx

from mla_jax import Config, Transformer
from mla_jax.base.batch import Batch
from mla_jax.cache import paged, retrieve
from mla_jax.cache.paged import SUMMARY, Layer, Pool
from mla_jax.cache.retrieve import RETRIEVAL_POLICIES, Quest, Retrieval, RetrievalPolicy
from mla_jax.decode.loop import LOOP_OPTIONS
from mla_jax.model import page_selection, rope
from mla_jax.model.dispatch import Dispatch, form_named
from mla_jax.model.mla import MLA

TINY = dataclasses.replace(Config.preset("tiny"), num_hidden_layers=3)
SIZE, WIDTH = 4, 12  # tokens of a page, pages of a row
ROWS, LINE = 3, 24  # tokens of a line, at least


def model_of(policy: str, attention: str = "auto", tokens: int = 5 * SIZE, config: Config = TINY, **dispatch: Any) -> Transformer:
    asked = Retrieval(RETRIEVAL_POLICIES[policy], tokens, dense=1)
    return Transformer(config, nnx.Rngs(0), dispatch=Dispatch(attention, retrieval=asked, **dispatch))


def poisoned(pool: Pool) -> Pool:
    """Arbitrary contents, as pages have that were used before."""
    return {name: jnp.full_like(a, jnp.nan if jnp.issubdtype(a.dtype, jnp.floating) else 255) for name, a in pool.items()}


def line_of(rows: np.ndarray, held: np.ndarray, cut: np.ndarray, length: int) -> np.ndarray:
    """The next tokens of rows `[R S ..]`, one row's after the other's, in a line of this length."""
    pieces = [row[start : start + count] for row, start, count in zip(rows, held, cut, strict=True)]
    return np.concatenate([*pieces, np.zeros((length - cut.sum(), *rows.shape[2:]), rows.dtype)])[None]


def scattered(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(rows * WIDTH).reshape(rows, WIDTH).astype(np.int32)


# what is noted


def attend(attn: MLA, x: jax.Array, layer: Layer, batch: Batch, asked: Retrieval) -> tuple[jax.Array, Layer]:
    form = form_named("move_elided")

    def prepare(batch: Batch) -> Any:
        return form.prepare(batch, layer.pool, attn.config, SIZE)

    step, turns = page_selection.of_step(asked, batch, layer.size, prepare), rope.turns(batch.positions, attn.config)
    return attn(x, layer, form, prepare(batch), turns, step)


def fed(attn: MLA, x: np.ndarray, cuts: list[np.ndarray], table: np.ndarray, layer: Layer, asked: Retrieval) -> Layer:
    """Rows of tokens `[R S D]` in lines; a cut says how many of each row's tokens come next."""
    held, longest = np.zeros(len(x), np.int32), max(LINE, *(int(cut.sum()) for cut in cuts))
    call = jax.jit(lambda x, layer, batch: attend(attn, x, layer, batch, asked)[1])
    for cut in cuts:
        batch = Batch.in_line(jnp.asarray(held), jnp.asarray(held), jnp.asarray(cut), longest, jnp.asarray(table))
        layer, held = call(jnp.asarray(line_of(x, held, cut, longest)), layer, batch), held + cut
    return layer


def cuts_of(lengths: np.ndarray, seed: int) -> list[np.ndarray]:
    """Random pieces, none for some rows."""
    rng, left, found = np.random.default_rng(seed), lengths.copy(), []
    while left.any():
        found.append(np.minimum(left, rng.integers(0, 9, len(left))).astype(np.int32))
        left = left - found[-1]
    return found


@pytest.mark.deep
@pytest.mark.parametrize("policy", RETRIEVAL_POLICIES)
def test_summaries_are_those_of_a_page_s_tokens_however_they_came(policy):
    """In pages that were full of NaN before, in the second layer of a pool."""
    model, asked = model_of(policy), Retrieval(RETRIEVAL_POLICIES[policy], 5 * SIZE)
    attn, table, lengths = model.layers[1].attn, scattered(ROWS), np.array([33, 18, 47])
    x = np.random.default_rng(1).normal(size=(ROWS, WIDTH * SIZE, TINY.hidden_size)).astype(np.float32)
    pages, known = ROWS * WIDTH, [retrieved.attention_of(attn, jnp.asarray(row[None])) for row in x]
    for seed in range(3):
        start = Layer(poisoned(model.new_pool(pages, SIZE)), jnp.int32(pages))
        layer = fed(attn, x, cuts_of(lengths, seed), table, start, asked)
        for row, (length, (q, kv)) in enumerate(zip(lengths, known, strict=True)):
            for number in range(-(-length // SIZE)):
                page = slice(number * SIZE, min((number + 1) * SIZE, length))
                mine = layer.pool[SUMMARY][pages + table[row, number]]
                wanted = (
                    retrieved.bounds_of(kv[page])
                    if policy == "quest"
                    else retrieved.representative(q[page].sum(1), kv[page])[None]
                )
                np.testing.assert_allclose(mine, wanted, rtol=1e-3, atol=1e-4)
        assert np.isnan(layer.pool[SUMMARY][:pages]).all(), "another layer's pages were written"


@pytest.mark.deep
def test_as_many_pages_as_tokens_may_write_are_noted():
    """The most: two tokens of each row on both sides of a border."""
    before, counts = jnp.asarray([3, 7, 11]), jnp.asarray([2, 6, 2])
    batch = Batch.in_line(before, before, counts, 12, jnp.asarray(scattered(ROWS)))
    found = page_selection.written(paged.rows_of(batch, SIZE), SIZE)
    table = scattered(ROWS)
    pages = [table[0, 0], table[0, 1], table[1, 1], table[1, 2], table[1, 3], table[2, 2], table[2, 3]]
    assert found.page[:7].tolist() == pages
    assert found.filled.tolist() == [4, 1, 4, 4, 1, 4, 1, 0, 0]
    assert found.before[:7].tolist() == [3, 0, 3, 0, 0, 3, 0]
    assert found.token[2, 3] == 2
    assert found.token[3].tolist() == [3, 4, 5, 6]


# what is attended to


def decoded(model: Transformer, tokens: np.ndarray, prompts: np.ndarray, steps: int) -> list[np.ndarray]:
    """Hidden states of each row's decode steps; prompts come in one line, of which the last token of row 0 is in a second one."""
    table, call = jnp.asarray(scattered(len(tokens))), jax.jit(lambda ids, batch, pool: model(ids, batch, pool)[:2])
    pool, held = poisoned(model.new_pool(len(tokens) * WIDTH, SIZE)), np.zeros(len(tokens), np.int32)
    one, length = np.eye(len(prompts), dtype=np.int32)[0], int(prompts.sum())
    for cut in (prompts - one, one):
        batch = Batch.in_line(jnp.asarray(held), jnp.asarray(held), jnp.asarray(cut), length, table)
        pool, held = call(jnp.asarray(line_of(tokens, held, cut, length)), batch, pool)[1], held + cut
    said = [[] for _ in tokens]
    for step in range(2 * steps):
        counts = np.array([1, step % 2, 1], np.int32) * (held < prompts + steps)  # the second row pauses now and then
        ids = jnp.asarray(tokens[np.arange(len(tokens)), held][:, None])
        hidden, pool = call(ids, Batch.behind(*map(jnp.asarray, (held, held, counts)), 1, table), pool)
        for row in np.flatnonzero(counts):
            said[row].append(np.asarray(hidden[row, 0]))
        held = held + counts
    return [np.stack(row) for row in said]


@pytest.mark.deep
@pytest.mark.parametrize(("policy", "attention"), [("quest", "move_elided"), ("infllm", "move_elided"), ("quest", "fused")])
def test_a_decode_is_that_of_whole_sequences_in_which_each_token_sees_what_it_chooses(policy, attention):
    model, steps = model_of(policy, attention), 12
    tokens = np.random.default_rng(2).integers(2, TINY.vocab_size, (ROWS, SIZE * WIDTH)).astype(np.int32)
    prompts = np.array([30, 18, 35], np.int32)
    for row, mine in enumerate(decoded(model, tokens, prompts, steps)):
        ids, prompt = tokens[row].tolist(), int(prompts[row])
        said = [retrieved.hidden_states(model, ids, prompt, policy, most, SIZE, dense=1) for most in (5, WIDTH)]
        some, everything = (hidden[prompt : prompt + steps] for hidden in said)
        np.testing.assert_allclose(mine, some, rtol=1e-3, atol=1e-3)
        assert np.abs(everything - some).max() > 1e-2, "the choice has left nothing out"


@pytest.mark.deep
@pytest.mark.parametrize("rows", [1, 2])
def test_blocks_of_rows_choose_what_all_rows_at_once_choose(rows, monkeypatch):
    model, prompts = model_of("quest", "move_elided"), np.array([30, 18, 35], np.int32)
    tokens = np.random.default_rng(2).integers(2, TINY.vocab_size, (ROWS, SIZE * WIDTH)).astype(np.int32)
    expected = decoded(model, tokens, prompts, 4)
    one = model.new_pool(1, SIZE)[SUMMARY][0].nbytes * WIDTH
    monkeypatch.setattr(retrieve, "AT_ONCE", rows * one)
    assert retrieve.rows_at_once(one) == rows
    for mine, other in zip(decoded(model, tokens, prompts, 4), expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.deep
@pytest.mark.parametrize("attention", ["compressed", "absorbed", "fused"])
@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
def test_all_forms_attend_to_the_same_pages(attention, kv_cache):
    config = dataclasses.replace(TINY, kv_lora_rank=128)
    tokens = np.random.default_rng(2).integers(2, TINY.vocab_size, (ROWS, SIZE * WIDTH)).astype(np.int32)
    said = [
        decoded(model_of("quest", form, config=config, kv_cache=kv_cache), tokens, np.array([30, 18, 35], np.int32), 4)
        for form in (attention, "move_elided")
    ]
    for mine, other in zip(*said, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=2e-3)


@pytest.mark.deep
@pytest.mark.parametrize("policy", RETRIEVAL_POLICIES)
def test_a_row_whose_pages_are_all_chosen_attends_as_without_a_choice_in_bfloat16_too(policy):
    """Which a CPU stores as bits."""
    tokens = np.random.default_rng(2).integers(2, TINY.vocab_size, (ROWS, SIZE * WIDTH)).astype(np.int32)
    said = []
    for asked in (Retrieval(RETRIEVAL_POLICIES[policy], SIZE * (WIDTH - 1), dense=0), None):
        graph, weights = nnx.split(Transformer(TINY, nnx.Rngs(0), dispatch=Dispatch("move_elided", retrieval=asked)))
        model = nnx.merge(graph, jax.tree.map(lambda a: a.astype(jnp.bfloat16), weights))
        said.append(decoded(model, tokens, np.array([30, 18, 31], np.int32), 12))
    assert SUMMARY not in model.new_pool(1)
    for mine, other in zip(*said, strict=True):
        np.testing.assert_allclose(mine.astype(np.float32), other.astype(np.float32), rtol=0, atol=0.05)  # a few roundings


class Chance(RetrievalPolicy):
    """Pages by their random numbers: the baseline of a policy."""

    name, vectors = "chance", 2
    seed = 0

    def summary(self, keys, held, asked):
        return Quest().summary(keys, held, asked)

    def scores(self, q, summary, held, scale):
        return jax.random.uniform(jax.random.key(self.seed), held.shape)


def needle_layer() -> MLA:
    """Attention with one head. Channels 0 to 15 of x are filler, 16 is a name, 17 its content, 18 asks for the name. The latent
    is x's first 18 channels, a query is the name's direction as much as x asks for it, and the output is the content."""
    sizes = {"hidden_size": 32, "num_attention_heads": 1, "q_lora_rank": None, "kv_lora_rank": 32}
    config = dataclasses.replace(TINY, **sizes, qk_nope_head_dim=32, v_head_dim=32)
    attn, width = MLA(config, nnx.Rngs(0)), config.qk_rope_head_dim
    first = np.diag((np.arange(32) < 18).astype(np.float32))
    asks, content = np.zeros((32 + width, 32), np.float32), np.zeros((32, 32), np.float32)
    asks[16, 18], content[0, 17] = 20, 1
    attn.q_proj[...] = jnp.asarray(asks)
    attn.kv_a_proj[...] = jnp.asarray(np.concatenate([first, np.zeros((width, 32), np.float32)]))
    attn.uk[...] = attn.uv[...] = jnp.eye(32)[None]
    attn.o_proj[...] = jnp.asarray(content)
    return attn


@pytest.mark.deep
@pytest.mark.parametrize("policy", [Quest(), RETRIEVAL_POLICIES["infllm"], Chance()], ids=lambda policy: policy.name)
def test_a_needle_in_one_page_is_found_where_random_pages_lose_it(policy):
    """The tokens after the needle speak of it, which InfLLM goes by. One of nine pages can be chosen."""
    attn, asked, length = needle_layer(), Retrieval(policy, 4 * SIZE), WIDTH * SIZE - 1
    pages, eye = np.arange(1, WIDTH - 2), np.eye(32)
    x = np.zeros((len(pages), length + 1, 32), np.float32)
    x[:, :, :16] = np.random.default_rng(0).normal(size=(len(pages), length + 1, 16))
    for row, page in zip(x, pages, strict=True):
        row[page * SIZE] = 4 * (eye[16] + eye[17])
        row[page * SIZE + 1 : (page + 1) * SIZE, 18] = 0.3
    x[:, -1] = eye[18]
    token, table = {"c_kv": like(32), "k_pe": like(16), "asked": like()}, scattered(len(pages))
    pool = paged.init(token, 1, table.size, SIZE, page={SUMMARY: summary(policy)})
    held = np.full(len(pages), length, np.int32)
    layer = fed(attn, x[:, :-1], [held], table, Layer(pool, jnp.int32(0)), asked)
    batch = Batch.behind(jnp.asarray(held), jnp.asarray(held), jnp.ones(len(pages), jnp.int32), 1, jnp.asarray(table))
    found = jax.jit(lambda x, layer: attend(attn, x, layer, batch, asked)[0])(jnp.asarray(x[:, -1:]), layer)[:, 0, 0]
    if policy.name == "chance":
        assert (found > 1).sum() <= 3
    else:
        assert found.min() > 3


def like(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, 1, *shape), jnp.float32)


def summary(policy: RetrievalPolicy) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, policy.vectors, 48), jnp.float32)


# what it costs


@pytest.mark.deep
@pytest.mark.parametrize("policy", RETRIEVAL_POLICIES)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_loop_of_decode_steps_copies_no_pool(policy, rows):
    model = model_of(policy, "move_elided", 5 * paged.PAGE)
    graph, state = nnx.split(model)
    pool = jax.eval_shape(lambda: model.new_pool(50_000))

    def run(state: nnx.State, pool: Pool, table: jax.Array, held: jax.Array, steps: jax.Array) -> tuple[Pool, jax.Array]:
        model = nnx.merge(graph, state)

        def step(carry: tuple) -> tuple:
            i, pool, held, tokens = carry
            hidden, pool, _ = model(tokens, Batch.behind(held, held, jnp.ones_like(held), 1, table), pool)
            return i + 1, pool, held + 1, jnp.argmax(model.unembed(hidden), -1).astype(jnp.int32)

        start = jnp.int32(0), pool, held, jnp.zeros((rows, 1), jnp.int32)
        _, pool, _, tokens = jax.lax.while_loop(lambda carry: carry[0] < steps, step, start)
        return pool, tokens

    shapes = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, 32), (rows,), ()))
    program = jax.jit(run, donate_argnums=1, compiler_options=LOOP_OPTIONS["cpu"]).lower(state, pool, *shapes).compile()
    sizes = [a.size * a.dtype.itemsize for a in pool.values()]
    assert program.memory_analysis().temp_size_in_bytes < min(sizes)
    assert program.memory_analysis().alias_size_in_bytes >= sum(sizes)


def test_nothing_is_chosen_where_a_row_cannot_have_more_pages_than_are_read():
    asked, table = Retrieval(Quest(), SIZE * WIDTH), jnp.asarray(scattered(2))
    held = jnp.asarray([30, 9])
    batch = Batch.behind(held, held, jnp.ones_like(held), 1, table)
    assert page_selection.of_step(asked, batch, SIZE, lambda batch: None).pages is None
    fewer = dataclasses.replace(asked, tokens=SIZE * (WIDTH - 1))
    assert page_selection.of_step(fewer, batch, SIZE, lambda batch: None).pages == WIDTH - 1
