"""Meshes of eight simulated devices: greedy and sampled tokens equal one device's, a device's cache is as planned, and the
programs send exactly the messages counted by hand."""

import collections
import functools
import re

import jax
import numpy as np
import pytest
import serving
import sharded
from models import FAMILIES, tensors, write
from serving import answer, evicting_engine
from weights import fp8

from mla_jax import LLM
from mla_jax.base.axes import parse_mesh
from mla_jax.cache.evict import BUDGET_RULES
from mla_jax.cache.evict import EVICTION_POLICIES as EVICTING
from mla_jax.cache.paged import PAGE
from mla_jax.cache.retrieve import RETRIEVAL_POLICIES, Retrieval
from mla_jax.decode.evict_programs import Selection
from mla_jax.decode.loop import Programs
from mla_jax.decode.speculative import Lookup, Mtp
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.size import Size
from mla_jax.engine.policy.retrieving import Retrieving
from mla_jax.mesh.devices import Devices
from mla_jax.mesh.expert_copies import placed
from mla_jax.model.dispatch import Dispatch
from mla_jax.weights.load import Checkpoint, load

MESHES = [
    "data=8", "tensor=8", "context=8", "data=4,tensor=2", "data=2,tensor=4", "data=4,context=2", "data=2,context=4",
    "tensor=4,context=2", "tensor=2,context=4", "data=2,tensor=2,context=2", "data=2", "tensor=2", "context=2",
]  # fmt: skip
SIZE = Size(rows=4, pages=24, context=384, chunk=128)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
EIGHT = {**HEADS, "n_routed_experts": 16}
LAYERS = 2  # the first is dense
generating = pytest.mark.deep


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @functools.cache
    def folder(family: str, blocks: bool = False):
        hf = {**FAMILIES[family], **(EIGHT if "n_routed_experts" in FAMILIES[family] else HEADS)}
        hf |= {"num_hidden_layers": LAYERS} | ({"num_layers": LAYERS // 2} if "num_layers" in hf else {})
        found = tensors(hf, mtp=bool(hf.get("num_nextn_predict_layers")))
        if blocks:
            hf["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8]}
            found = fp8.quantized(found, (8, 8))
        return write(tmp_path_factory.mktemp(family), hf, found)

    return folder


def prompts(words: int = 96) -> list[list[int]]:
    rng = np.random.default_rng(0)
    found = [rng.integers(2, words, n).tolist() for n in (5, 70, 130, 64, 1, 33)]
    return [*found, [*found[2][:128], 7, 8, 9], rng.integers(2, words, 200).tolist()]  # one begins as another does


def requests() -> list:
    sampled = {"temperature": 0.9, "top_k": 30, "top_p": 0.9}
    given = [serving.request(prompt, max_tokens=20, seed=i, **(sampled if i % 2 else {})) for i, prompt in enumerate(prompts())]
    return [*given, serving.request(prompts()[1], max_tokens=12, logprobs=2, prompt_logprobs=1)]


def on(model, mesh: str | None):
    return model if mesh is None else sharded.spread(model, Devices.of(parse_mesh(mesh)))


def plainly(programs: Programs) -> Engine:
    return Engine(programs, SIZE)


def tokens(model, mesh: str | None, engine_of=plainly, **programs) -> list[list[int]]:
    return answer(engine_of(Programs(on(model, mesh), **programs)), *requests())


@pytest.fixture(scope="module")
def expected(folder_of):
    """The tokens of one device."""

    @functools.cache
    def found(family: str, *options, **programs) -> list[list[int]]:
        return tokens(load(folder_of(family), dispatch=Dispatch(*options)), None, **programs)

    return found


def test_a_mesh_of_all_axes_gives_the_tokens_of_one_device(folder_of, expected):
    assert tokens(load(folder_of("v3")), "data=2,tensor=2,context=2") == expected("v3")


@generating
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_gives_the_tokens_of_one_device(folder_of, expected, mesh):
    assert tokens(load(folder_of("v3")), mesh) == expected("v3")


@generating
@pytest.mark.parametrize("mesh", ["data=4,tensor=2", "tensor=4,context=2", "data=2,context=2"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "v3"])
def test_every_family_gives_the_tokens_of_one_device(folder_of, expected, family, mesh):
    assert tokens(load(folder_of(family)), mesh) == expected(family)


@generating
@pytest.mark.parametrize("mesh", ["data=8", "tensor=8", "data=2,tensor=2,context=2"])
def test_weights_in_blocks_of_fp8_give_the_tokens_of_one_device(folder_of, mesh):
    """Of the query's 24 rows a head, three blocks, each device of tensor=8 has one head's."""
    folder = folder_of("v3", blocks=True)
    devices = Devices.of(parse_mesh(mesh))
    model = Checkpoint(folder, devices=devices).load()
    engine = plainly(Programs(model))
    assert answer(engine, *requests()) == tokens(load(folder), None)


@generating
@pytest.mark.parametrize("mesh", ["data=4,tensor=2", "data=2,context=4", "tensor=4"])
@pytest.mark.parametrize("exchange", ["gather", "all_to_all"])
def test_either_exchange_gives_the_tokens_of_one_device(folder_of, expected, mesh, exchange):
    assert tokens(load(folder_of("v3"), dispatch=Dispatch(exchange=exchange)), mesh) == expected("v3")


@generating
@pytest.mark.parametrize("exchange", ["gather", "all_to_all"])
def test_copies_of_experts_give_the_tokens_of_one_device(folder_of, expected, exchange):
    devices = Devices.of(parse_mesh("data=2,tensor=2"))
    checkpoint = Checkpoint(folder_of("v3"), dispatch=Dispatch(exchange=exchange), devices=devices)
    slots = placed(1 / np.arange(1, 17), 4, copies=2)
    model = checkpoint.with_copies({1: slots}).load()
    assert model.layers[1].mlp.experts.gate.shape[0] == 24
    assert answer(plainly(Programs(model)), *requests()) == expected("v3")


@generating
@pytest.mark.parametrize("mesh", ["data=4,tensor=2", "data=2,tensor=2,context=2", "context=4"])
@pytest.mark.parametrize("drafter", [Mtp(), Lookup()], ids=["mtp", "lookup"])
def test_drafts_change_nothing(folder_of, expected, mesh, drafter):
    assert tokens(load(folder_of("v3")), mesh, drafter=drafter) == expected("v3")


@generating
@pytest.mark.parametrize("mesh", ["data=4,tensor=2", "data=2,tensor=2,context=2"])
@pytest.mark.parametrize("attention", ["naive", "compressed", "absorbed", "move_elided"])
def test_every_form_gives_the_tokens_of_one_device(folder_of, expected, mesh, attention):
    assert tokens(load(folder_of("v3"), dispatch=Dispatch(attention)), mesh) == expected("v3", attention)


@generating
@pytest.mark.parametrize("mesh", ["data=4,tensor=2", "data=2,tensor=2,context=2"])
def test_latents_in_e4m3_give_the_tokens_of_one_device(tmp_path, mesh):
    hf = {**FAMILIES["v3"], **EIGHT, "num_hidden_layers": LAYERS, "kv_lora_rank": 128}
    folder = write(tmp_path, hf, tensors(hf, mtp=True))
    model = load(folder, dispatch=Dispatch(kv_cache="fp8"))
    assert tokens(model, mesh) == tokens(model, None)


@generating
@pytest.mark.parametrize("mesh", ["data=4", "data=2,tensor=2", "context=2", "data=2,tensor=2,context=2"])
@pytest.mark.parametrize("budget", ["uniform", "ada"])
def test_rows_that_drop_tokens_give_the_tokens_of_one_device(folder_of, expected, mesh, budget):
    evicts = Selection(EVICTING["snapkv"], BUDGET_RULES[budget], recent=16)

    def engine_of(programs: Programs) -> Engine:
        return evicting_engine(programs, SIZE, 0.5)

    model = load(folder_of("v3"))
    assert tokens(model, mesh, engine_of, evicts=evicts) == tokens(model, None, engine_of, evicts=evicts)


@generating
def test_heads_that_drop_tokens_give_the_tokens_of_one_device_where_their_tokens_are_sharded(folder_of):
    evicts = Selection(EVICTING["critical"], BUDGET_RULES["ada"], recent=16)
    model = load(folder_of("v3"), dispatch=Dispatch("naive"))

    def engine_of(programs: Programs) -> Engine:
        return evicting_engine(programs, SIZE, 0.5)

    assert tokens(model, "data=2,context=2", engine_of, evicts=evicts) == tokens(model, None, engine_of, evicts=evicts)


@generating
@pytest.mark.parametrize("policy", RETRIEVAL_POLICIES)
def test_rows_that_read_some_pages_give_the_tokens_of_one_device(folder_of, policy):
    retrieval = Retrieval(RETRIEVAL_POLICIES[policy], 4 * PAGE, dense=0, recent=1)

    def engine_of(programs: Programs) -> Engine:
        return Engine(programs, SIZE, policy=Retrieving(programs, SIZE))

    model = load(folder_of("v3"), dispatch=Dispatch(retrieval=retrieval))
    assert tokens(model, "data=2,tensor=2", engine_of) == tokens(model, None, engine_of)


@generating
def test_rows_that_are_preempted_give_the_tokens_of_one_device(folder_of, expected):
    programs = Programs(on(load(folder_of("v3")), "data=2,tensor=2"))
    assert answer(plainly(programs), *requests(), preempt_every=3) == expected("v3")


@generating
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "context=2"])
def test_a_forward_pass_shows_what_one_device_shows(folder_of, mesh):
    tokens = np.arange(3, 24).reshape(3, 7)
    asked = {"hidden": [0, LAYERS], "lens": [1], "attention": [1, 0], "router": True, "cache": True}
    alone, spread = (LLM(folder_of("v3"), dtype="float32", mesh=each).forward(tokens, **asked) for each in (None, mesh))
    assert alone.keys() == spread.keys()
    for name, array in alone.items():
        assert array.shape == spread[name].shape
        assert np.abs(array - spread[name]).max() <= 1e-4 * np.abs(array).max(), name


def cached_bytes(array) -> set[int]:
    """Of each device."""
    return {shard.data.nbytes for shard in array.addressable_shards}


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["data=8", "tensor=8", "data=2,tensor=2,context=2"])
def test_a_device_caches_what_is_planned(folder_of, mesh):
    """A latent and its rotary key, float32, of each of the three layers, MTP's included; with context=2 half the tokens."""
    devices = Devices.of(parse_mesh(mesh))
    engine = plainly(Programs(on(load(folder_of("v3")), mesh)))
    pool, _ = engine.device.state()
    token = 4 * (32 + 8) * (LAYERS + 1)
    expected = SIZE.pages * PAGE * token // devices.sizes["context"]
    (found,) = {sum(sizes) for sizes in zip(*(cached_bytes(array) for array in pool.values()), strict=True)}
    assert found == expected
    assert sum(shard.data.nbytes for array in pool.values() for shard in array.addressable_shards) == 8 * expected


COLLECTIVES = re.compile(r"= .*? (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
MOE = LAYERS - 1
# Of one decode program, where a token is chosen, read, and chosen again in a loop. `ENDS` and `ASKS`: whether any row goes on,
# and whether any asks for log-probabilities, of which three arrays come back to all devices that share the vocabulary.
ENDS = ASKS = 1
ALL_OVER_DATA = {"all-gather": MOE + 2, "reduce-scatter": MOE}  # tokens with their choices, two arrays of what is found; sums
EXPECTED = {
    "data=8": {**ALL_OVER_DATA, "all-reduce": ENDS + ASKS},
    # embedding, each layer's attention and its MLP, shared and routed experts together; logits; tokens and whether logits are fit
    "tensor=8": {"all-reduce": 1 + LAYERS + LAYERS + ENDS + ASKS, "all-to-all": 1, "all-gather": 2 + 3},
    # the largest score of each layer, then sums and weighted values together; routed experts
    "context=8": {"all-reduce": 2 * LAYERS + MOE + ENDS + ASKS},
}


@pytest.mark.deep
@pytest.mark.parametrize("mesh", EXPECTED)
def test_a_decode_program_sends_what_was_counted_by_hand(folder_of, mesh):
    model = load(folder_of("v3"), dispatch=Dispatch(exchange="gather"))
    programs = Programs(on(model, mesh))
    pool, rows = programs.new(SIZE.rows, SIZE.pages, 0)
    tables = jax.ShapeDtypeStruct((4, SIZE.width), np.int32)
    one = jax.ShapeDtypeStruct((4,), np.int32), tables, jax.ShapeDtypeStruct((), np.int32)
    text = programs.run.lower(pool, rows, *one).compile().as_text()
    found = collections.Counter(COLLECTIVES.findall(text))
    assert found == EXPECTED[mesh]
    largest = max((int(size) for size in re.findall(r"= \w+\[(\d+)[,\]][^=]* all-gather", text)), default=0)
    assert largest <= 8 * SIZE.rows  # rows and not pages or weights
