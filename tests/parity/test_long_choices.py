"""Models that choose among 16,384 tokens, read in chunks: transformers' logits and tokens, however requests are served."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import serving
import sharded
from serving import answer

from mla_jax.base.axes import parse_mesh
from mla_jax.base.batch import Batch
from mla_jax.cache import paged
from mla_jax.cache.paged import PAGE
from mla_jax.decode.loop import Programs
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.size import Size
from mla_jax.mesh.devices import Devices
from mla_jax.weights.load import load

pytestmark = [pytest.mark.parity, pytest.mark.deep]
LENGTH, CHUNK, STEPS = 16_384, 512, 8
WIDTH = LENGTH // PAGE + 1  # pages of the prompt and its answer
# The rows share the prompt's pages
SIZE = Size(rows=4, pages=WIDTH + 40, context=WIDTH * PAGE, chunk=CHUNK)
# Short enough that a machine with two cores comes to its end; with fewer heads more scores are exactly zero, and tie
SHORTER = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "index_n_heads": 16,
    "index_topk": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2 * LENGTH,
}
# The second layer of GLM-5 takes the choice of the first, that of V3.2 makes its own
FAMILIES = {"v32": {}, "glm_5": {"index_skip_topk_offset": 1}}


@pytest.fixture(scope="module", params=FAMILIES)
def both(request, tmp_path_factory):
    """A model, a prompt, and transformers' logits and greedy tokens for it."""
    oracle = pytest.importorskip("parity.oracle", reason="the extra `parity` is missing", exc_type=ModuleNotFoundError)
    hf = models.FAMILIES[request.param] | SHORTER | FAMILIES[request.param]
    folder = models.write(tmp_path_factory.mktemp(request.param), hf, models.tensors(hf))
    prompt = np.random.default_rng(0).integers(2, hf["vocab_size"], LENGTH).tolist()
    return load(folder), prompt, *oracle.in_chunks(oracle.load(folder), prompt, CHUNK, STEPS)


def test_chunks_have_the_logits_of_transformers(both):
    """A choice between scores that are equal but for rounding changes a position, and those that attend to it."""
    model, prompt, theirs, _ = both
    forward = jax.jit(lambda tokens, batch, pool: model(tokens, batch, pool)[:2])
    table, ours = paged.in_order(1, LENGTH), []
    pool = model.new_pool(table.size)
    for first in range(0, LENGTH, CHUNK):
        batch = Batch.after(jnp.full(1, first, jnp.int32), jnp.ones((1, CHUNK), bool), table)
        hidden, pool = forward(jnp.asarray([prompt[first : first + CHUNK]], jnp.int32), batch, pool)
        ours.append(np.asarray(model.unembed(hidden))[0])
    off = np.abs(np.concatenate(ours) - theirs).max(-1) / theirs.std()
    assert np.median(off) < 1e-5
    assert (off <= 1e-4).mean() > 0.99


def requests(prompt: list[int]) -> list:
    """The prompt, a part of it that ends otherwise, and a short one."""
    return [serving.request(some, max_tokens=STEPS) for some in (prompt, [*prompt[: LENGTH // 2], 5, 6, 7], prompt[:100])]


def test_answers_are_those_of_transformers_from_a_shared_prefix_and_after_preemption_too(both):
    model, prompt, _, greedy = both
    engine = Engine(Programs(model), SIZE)
    asked = requests(prompt)
    found = answer(engine, *asked)
    assert found[0] == greedy
    before = engine.stats.read
    assert answer(engine, *asked) == found
    assert engine.stats.read - before < 3 * PAGE, "the pages of all prompts are cached"
    again = answer(engine, asked[2], *asked[:2], preempt_every=2)
    assert again == [found[2], *found[:2]]
    assert engine.stats.preemptions > 1


def test_a_mesh_gives_the_answers_of_transformers(both):
    model, prompt, _, greedy = both
    mesh = Devices.of(parse_mesh("data=2,tensor=2"))
    engine = Engine(Programs(sharded.spread(model, mesh)), SIZE)
    assert answer(engine, requests(prompt)[0])[0] == greedy
