"""Keys of an indexer in E4M3: codes and scores as DeepSeek's definition has them, in numpy, and what rounding changes."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.linalg
from flax import nnx

from mla_jax import Config, Transformer
from mla_jax.base.batch import Batch
from mla_jax.cache import paged
from mla_jax.model import fp8_index, kernels
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.fp8_index import AS_COMPUTED, IN_E4M3
from mla_jax.model.indexer import IndexQueries, index_scores
from mla_jax.model.parts import page_bytes, parts_of

WIDTH, HEADS, TOKENS = 128, 64, 300  # of DeepSeek-V3.2's indexers
FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
CONFIG = Config.preset("tiny", model_type="deepseek_v32", kv_lora_rank=128, index_topk=24, index_n_heads=8, index_head_dim=WIDTH)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """With some columns that are much larger than others, the same ones for every seed."""
    columns = np.exp(1.5 * np.random.default_rng(9).standard_normal(shape[-1]))
    return (np.random.default_rng(seed).standard_normal(shape) * columns).astype(np.float32)


def packed(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes in E4M3 of the transformed vectors, and the least power of two for each that holds its numbers."""
    turned = x.astype(np.float64) @ scipy.linalg.hadamard(WIDTH) / WIDTH**0.5
    scale = np.exp2(np.ceil(np.log2(np.abs(turned).max(-1, keepdims=True) / 448)))
    return (turned / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn), scale


def defined_scores(q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Products of codes; the scales of queries are in the weights, those of keys come last."""
    (q8, q_scale), (k8, k_scale) = packed(q), packed(keys)
    products = np.einsum("tji,si->tjs", q8.astype(np.float64), k8.astype(np.float64))
    shares = weights[..., None] * q_scale
    return (np.maximum(products, 0) * shares).sum(1) * k_scale[:, 0]


def test_codes_are_those_of_the_definition_but_for_ties_of_rounding():
    keys = numbers(1, TOKENS, WIDTH)
    held, (codes, scale) = IN_E4M3.remembers(jnp.asarray(keys)), packed(keys)
    np.testing.assert_array_equal(held[paged.INDEX_SCALE], scale)
    found = np.asarray(held[paged.INDEX_K]).astype(np.float32)
    assert (found == codes.astype(np.float32)).mean() > 0.999
    np.testing.assert_allclose(found, codes.astype(np.float32), rtol=1 / 8, atol=2**-9)


def test_scores_are_those_of_the_definition():
    q, keys, weights = numbers(5, HEADS, WIDTH, seed=1), numbers(TOKENS, WIDTH), numbers(5, HEADS, seed=2)
    held = IN_E4M3.remembers(jnp.asarray(keys[None]))
    queries = IndexQueries(IN_E4M3.asks(jnp.asarray(q[None])), jnp.asarray(weights[None]))
    found = np.asarray(index_scores(queries, IN_E4M3.reads(held, FLOAT32)))[0]
    wanted = defined_scores(q, weights, keys)
    np.testing.assert_allclose(found, wanted, atol=2e-3 * np.abs(wanted).max())


def test_numbers_of_codes_are_exact_in_bfloat16():
    held = IN_E4M3.remembers(jnp.asarray(numbers(1, TOKENS, WIDTH)))
    in_half, in_full = (IN_E4M3.reads(held, dtype) for dtype in (BFLOAT16, FLOAT32))
    np.testing.assert_array_equal(np.asarray(in_half, np.float32), in_full)


def test_the_transform_keeps_products_and_makes_rounding_lose_less():
    q, keys = numbers(1, 20, HEADS, WIDTH, seed=1), numbers(1, TOKENS, WIDTH)
    exact = np.einsum("btji,bsi->btjs", q, keys)
    turned = np.einsum("btji,bsi->btjs", *(np.asarray(fp8_index.transformed(jnp.asarray(x))) for x in (q, keys)))
    np.testing.assert_allclose(turned, exact, atol=1e-5 * np.abs(exact).max())
    held = IN_E4M3.remembers(jnp.asarray(keys))
    found = np.einsum("btji,bsi->btjs", IN_E4M3.asks(jnp.asarray(q)), IN_E4M3.reads(held, FLOAT32))
    rounded = (kernels.dequantize_latent(*kernels.quantize_latent(x), FLOAT32) for x in map(jnp.asarray, (q[0], keys)))
    without = np.einsum("tji,bsi->btjs", *rounded)
    assert np.abs(found - exact).mean() < 0.6 * np.abs(without - exact).mean()


def model_of(kv_cache: str) -> Transformer:
    return Transformer(CONFIG, nnx.Rngs(0), dispatch=Dispatch("move_elided", kv_cache=kv_cache))


@pytest.mark.deep
def test_a_model_chooses_nearly_the_same_tokens():
    """24 of 200, by one of its indexers: nine of ten, at least, are those that keys as computed choose."""
    indexer, rng = model_of("auto").layers[0].attn.indexer, np.random.default_rng(3)
    x, c_q = (jnp.asarray(rng.standard_normal((1, 200, n)), jnp.float32) for n in (CONFIG.hidden_size, CONFIG.q_lora_rank))
    turns = Dispatch().step(model_of("auto"), Batch.dense(1, 200), None).turns
    keys, queries = indexer.keys(x, turns), indexer.queries(x, c_q, turns)
    kept = []
    for format in (AS_COMPUTED, IN_E4M3):
        asked = queries._replace(q=format.asks(queries.q))
        scores = index_scores(asked, format.reads(format.remembers(keys), FLOAT32))
        kept.append(np.argsort(-np.asarray(scores)[0], axis=-1)[:, : CONFIG.index_topk])
    both = [np.intersect1d(mine, other).size for mine, other in zip(*kept, strict=True)]
    assert np.mean(both) > 0.9 * CONFIG.index_topk
    assert min(both) < CONFIG.index_topk, "some near-ties are decided otherwise"


def hidden_states(model: Transformer, chunks: list[int]) -> np.ndarray:
    """Of 120 tokens that are read in such chunks, each of which chooses among those before."""
    total = sum(chunks)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, total))
    pool, table, found, first = model.new_pool(-(-total // paged.PAGE)), paged.in_order(1, total), [], 0
    run = jax.jit(model.__call__)
    for new in chunks:
        batch = Batch.after(jnp.full(1, first, jnp.int32), jnp.ones((1, new), bool), table)
        hidden, pool, _ = run(jnp.asarray(tokens[:, first : first + new], jnp.int32), batch, pool)
        found.append(np.asarray(hidden))
        first += new
    return np.concatenate(found, axis=1)


@pytest.mark.deep
def test_chunks_of_a_prompt_give_what_the_whole_gives():
    model = model_of("fp8")
    whole = hidden_states(model, [120])
    for chunks in ([70, 50], [30, 30, 30, 29, 1]):
        np.testing.assert_allclose(hidden_states(model, chunks), whole, atol=2e-5)


@pytest.mark.deep
def test_hidden_states_are_near_those_of_keys_as_computed(monkeypatch):
    """Latents are in E4M3 in all; beside what happens where queries lack the transform, so that others are chosen."""
    found = hidden_states(model_of("fp8"), [120])
    with monkeypatch.context() as patch:
        patch.setattr(fp8_index, "keys_fit", lambda config: False)
        as_computed = hidden_states(model_of("fp8"), [120])
    monkeypatch.setattr(fp8_index, "IN_E4M3", IN_E4M3._replace(asks=lambda q: q))
    others = hidden_states(model_of("fp8"), [120])
    off, far = (np.abs(some - as_computed)[0].mean(-1) for some in (found, others))
    assert (off[: CONFIG.index_topk] == 0).all(), "the first tokens attend to all"
    assert 0 < off.mean() < far.mean() / 3


@pytest.mark.deep
def test_bytes_of_keys_are_counted_as_they_are_cached():
    """132 a token and layer, of 512 in float32."""
    fewer = page_bytes(model_of("auto")) - page_bytes(model_of("fp8"))
    latents = 4 * CONFIG.kv_lora_rank - (CONFIG.kv_lora_rank + 4)
    assert fewer == CONFIG.num_hidden_layers * paged.PAGE * (latents + 4 * WIDTH - 132)
    assert [parts_of(model_of(kind)).index_key for kind in ("auto", "fp8")] == [4 * WIDTH, 132]


@pytest.mark.parametrize("width", [32, 192])
def test_keys_of_other_widths_are_cached_as_computed(width):
    config = dataclasses.replace(CONFIG, index_head_dim=width)
    pool = Transformer(config, nnx.Rngs(0), dispatch=Dispatch(kv_cache="fp8")).new_pool(1)
    assert pool[paged.INDEX_K].shape == (3, paged.PAGE, width)
    assert paged.INDEX_SCALE not in pool
