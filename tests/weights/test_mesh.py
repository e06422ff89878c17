"""Weights on a mesh: each device has its own part, bit for bit, and no other is read for it."""

import gc
import os
import weakref
from functools import cache

import jax
import ml_dtypes
import models
import numpy as np
import pytest
from checkpoints import convert, packed_gguf, parts, released
from flax import nnx
from jax.sharding import NamedSharding
from weights import packed_models, parameters

from mla_jax.base.axes import parse_mesh
from mla_jax.base.errors import BadFile, Unsupported
from mla_jax.base.qtensor import QTensor, restore
from mla_jax.base.roofline import DEVICES
from mla_jax.mesh.devices import Devices
from mla_jax.model.dispatch import Dispatch
from mla_jax.weights import orbax_store, safetensors
from mla_jax.weights import plan as planning
from mla_jax.weights.fill import IN_MEMORY
from mla_jax.weights.fill_mesh import mesh_reads
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.plan import memory_plan

V3 = models.FAMILIES["v3"]
MESHES = ("data=8", "tensor=2", "tensor=4,context=2", "data=2,tensor=2,context=2")
# kind -> (the maker of its files, its options when it is opened)
KINDS = {
    "bf16": (lambda folder: released(folder, "v3", "bf16"), {}),
    "fp8": (lambda folder: released(folder, "v3", "fp8"), {}),
    "fp8, unpacked": (lambda folder: released(folder, "v3", "fp8"), {"dtype": "float32"}),
    "parts": (parts, {}),
    "Q8_0": (lambda folder: packed_gguf(folder.with_suffix(".gguf"), "new"), {}),
    "Q8_0, older": (lambda folder: packed_gguf(folder.with_suffix(".gguf"), "old"), {}),
    "Q4_K": (lambda folder: packed_models.written(made(folder), "gguf"), {}),
    "int8": (lambda folder: packed_models.written(made(folder), "int8"), {}),
    "orbax": (lambda folder: converted(folder, "--mesh", "tensor=2"), {}),
}
EVERY_MESH = ("bf16", "fp8", "Q8_0", "Q4_K")
SLOW = pytest.mark.deep


def cases():
    """Kinds of files and meshes; those that share their code with others run when that changes."""
    for kind in KINDS:
        for mesh in MESHES if kind in EVERY_MESH else MESHES[1:3]:
            alone = kind in ("fp8", "Q4_K") or (mesh == "tensor=2" and kind != "orbax")
            yield pytest.param(kind, mesh, marks=() if alone else SLOW)


def made(folder):
    folder.mkdir()
    return folder


def converted(folder, *options):
    assert convert(released(made(folder) / "hf", "v3", "fp8"), folder / "orbax", *options) == 0
    return folder / "orbax"


def opened(path, mesh: str, **options) -> Checkpoint:
    figures = options["dispatch"].device if "dispatch" in options else None
    return Checkpoint(path, devices=Devices.of(parse_mesh(mesh), figures), **options)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The files of a kind, the options to open them with, and the model of one device."""

    @cache
    def of(kind: str):
        make, options = KINDS[kind]
        path = make(tmp_path_factory.mktemp("mesh") / "model")
        return path, options, Checkpoint(path, **options).load()

    return of


@pytest.fixture
def reads(monkeypatch):
    """The names and bytes of all that is read of safetensors and GGUF files."""
    found, read = [], safetensors.TensorFiles.read

    def counted(self, name, *rest):
        value = read(self, name, *rest)
        found.append((name, value.nbytes))
        return value

    monkeypatch.setattr(safetensors.TensorFiles, "read", counted)
    return found


def leaves(model) -> dict:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(parameters.state(model))}


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "mesh"), [*cases()])
def test_parameters_are_those_of_one_device_to_the_bit_and_lie_as_the_layout_says(stored, kind, mesh):
    path, options, one = stored(kind)
    checkpoint = opened(path, mesh, **options)
    model = checkpoint.load()
    parameters.assert_equal(model, one)
    devices, layout, parts_of = checkpoint.devices, checkpoint.layout, checkpoint.local()
    assert model.dispatch.layout == layout
    for keys, variable in nnx.to_flat_state(nnx.split(model)[1]):
        name, value = ".".join(map(str, keys)), variable.get_value()
        specs = layout.specs(checkpoint.words(name), value)
        for array, spec, part in zip(*map(_leaves, (value, specs, parts_of[name])), strict=True):
            assert array.sharding.is_equivalent_to(NamedSharding(devices.mesh, spec), array.ndim), name
            assert {(shard.data.shape, shard.data.dtype) for shard in array.addressable_shards} == {(part.shape, part.dtype)}
    own = sum(array.addressable_shards[0].data.nbytes for array in leaves(model).values())
    assert own == checkpoint.bytes() == sum(checkpoint.formats().values()) == memory_plan(checkpoint).weights


def _leaves(value) -> list:
    return list(value.parts) if isinstance(value, QTensor) else [value]


@pytest.mark.deep
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", ["bf16", "Q8_0", "Q4_K"])
def test_each_byte_of_a_parameters_tensors_is_read_once_and_never_more_than_a_part(stored, reads, kind, mesh):
    path, options, _ = stored(kind)
    checkpoint = opened(path, mesh, **options)
    reads.clear()
    checkpoint.load()
    files = checkpoint.source.tensors
    of_parameters = [name for source in checkpoint.sources.values() for name in source.names]  # kv_b_proj for uk and for uv
    assert sum(size for _, size in reads) == sum(files[name].nbytes for name in of_parameters)
    assert max(size for _, size in reads) == checkpoint.largest_piece()


def test_a_device_reads_rows_columns_heads_and_experts_of_its_own(stored, reads):
    path, _, _ = stored("bf16")
    reads.clear()
    opened(path, "tensor=4,context=2").load()
    sizes: dict[str, list[int]] = {}
    for name, size in reads:
        sizes.setdefault(name, []).append(size // 2)
    at = "model.layers.1."
    assert sizes["model.embed_tokens.weight"] == sizes["lm_head.weight"] == [24 * 48] * 4
    assert sizes[at + "self_attn.q_b_proj.weight"] == [24 * 24] * 4
    assert sizes[at + "self_attn.kv_b_proj.weight"] == [32 * 32] * 8  # a head's rows, for uk and for uv
    assert sizes[at + "self_attn.o_proj.weight"] == [48 * 16] * 4
    assert sizes[at + "self_attn.kv_a_proj_with_mqa.weight"] == [40 * 48]
    assert sizes[at + "mlp.shared_experts.down_proj.weight"] == [48 * 6] * 4
    assert all(sizes[f"{at}mlp.experts.{x}.up_proj.weight"] == [24 * 48] for x in range(8))
    assert sizes[at + "mlp.gate.weight"] == [8 * 48]


def test_a_process_reads_what_its_own_devices_have(stored):
    path, _, _ = stored("bf16")
    checkpoint = opened(path, "data=2,tensor=2,context=2")

    def read(name: str, places: range) -> list:
        return [piece for piece, _ in mesh_reads(checkpoint, name).pieces(checkpoint.sources[name], places)]

    experts = "layers.1.mlp.experts.up"
    for places in (range(4), range(4, 8)):  # of the first data shard, of the second
        assert [piece.name.split(".")[5] for piece in read(experts, places)] == [str(x) for x in places]
        assert [piece.box for piece in read("layers.1.attn.o_proj", places)] == [((0, 48), (0, 32)), ((0, 48), (32, 64))]
        assert [piece.box for piece in read("norm", places)] == [((0, 48),)]


@pytest.mark.parametrize("kind", ["fp8", "fp8, unpacked"])
def test_blocks_that_a_part_begins_inside_of_are_read_around_it(stored, kind):
    path, options, _ = stored(kind)
    checkpoint = opened(path, "tensor=2", **options)
    found = mesh_reads(checkpoint, "layers.1.attn.o_proj")  # 64 columns in blocks of 24
    if kind == "fp8":
        assert [share.window for share in found.of] == [((0, 48), (0, 64))] * 2
        assert found.how.kept is None
    else:
        assert [(share.window, share.start) for share in found.of] == [
            (((0, 48), (0, 48)), (0, 0)),
            (((0, 48), (24, 64)), (0, 8)),
        ]
        assert (found.how.shape, found.how.kept) == ((48, 48), (48, 32))


@pytest.mark.deep
def test_chunks_of_a_conversion_for_the_mesh_are_read_once_and_none_for_another_device(stored, monkeypatch):
    path, _, _ = stored("orbax")
    read, sound = [], orbax_store._sound
    monkeypatch.setattr(orbax_store, "_sound", lambda *chunk: read.append(chunk[2].leaf) or sound(*chunk))
    checkpoint = opened(path, "tensor=2")
    checkpoint.load()
    twice = {leaf for leaf in read if read.count(leaf) > 1}
    assert {leaf.rsplit(".", 2)[0].rsplit(".", 1)[1] for leaf in twice} == {"kv_b_proj"}  # for uk and for uv
    stored_leaves = {
        chunk.leaf
        for name, tensor in checkpoint.source.store.tensors.items()
        for number, part in enumerate(tensor.parts)
        for chunk in part.chunks(name, number)
    }
    assert set(read) == stored_leaves
    read.clear()
    pieces = mesh_reads(checkpoint, "layers.1.mlp.experts.up").pieces(checkpoint.sources["layers.1.mlp.experts.up"], [1])
    for piece, _ in pieces:
        checkpoint.source.read(*piece)
    assert read == ["layers.1.mlp.experts.up.0.1", "layers.1.mlp.experts.up.1.1"]


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["fp8", "int8", "gguf"])
def test_reordered_parts_are_those_of_the_reordered_whole(tmp_path, hopper, kind):
    path, dispatch = packed_models.written(tmp_path, kind), Dispatch(device=DEVICES["NVIDIA H200"])
    hopper()
    one, several = Checkpoint(path, dispatch=dispatch), opened(path, "data=2,tensor=2", dispatch=dispatch)
    parts_of, wholes = several.local(), several.parameters()
    cut = {name for name in several.reordered if parts_of[name].shape != wholes[name].shape}
    assert {"layers.0.mlp.gate", "layers.0.mlp.down", "layers.1.mlp.experts.up"} <= cut
    assert several.reordered <= one.reordered
    (_, a), (_, b) = (nnx.split(checkpoint.load()) for checkpoint in (one, several))
    theirs = dict(nnx.to_flat_state(a))
    for keys, variable in nnx.to_flat_state(b):
        ours, expected = variable.get_value(), theirs[keys].get_value()
        if isinstance(ours, QTensor) and ours.format != expected.format:
            expected = restore(expected)
        for found, part in zip(_leaves(ours), _leaves(expected), strict=True):
            assert np.asarray(found).tobytes() == np.asarray(part).tobytes(), keys


@pytest.mark.deep
@pytest.mark.parametrize(("name", "place"), [("self_attn.o_proj", (3, 40)), ("mlp.experts.5.up_proj", (0, 0))])
def test_weights_that_are_not_finite_are_refused_by_their_names(tmp_path, name, place):
    weights = models.tensors(V3)
    weights[f"model.layers.1.{name}.weight"][place] = np.nan
    with pytest.raises(BadFile) as refused:
        opened(models.write(tmp_path, V3, weights), "data=2,tensor=4").load()
    assert refused.value.args[:2] == ("weights hold NaN or infinity", f"model.layers.1.{name}.weight")


@pytest.mark.deep
def test_progress_counts_every_byte_once_and_ends_at_the_total(stored):
    path, _, _ = stored("fp8")
    checkpoint, heard = opened(path, "data=2,tensor=2"), []
    checkpoint.load(progress=lambda done, total: heard.append((done, total)))
    (total,) = {total for _, total in heard}
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})
    assert heard[-1] == (total, total)


@pytest.mark.deep
def test_what_is_read_and_not_on_a_device_yet_is_what_the_plan_says(tmp_path, monkeypatch):
    weights = {name: w.astype(ml_dtypes.bfloat16) for name, w in models.tensors(V3, mtp=True).items()}
    checkpoint = opened(models.write(tmp_path, V3, weights), "data=2,tensor=2")
    held, most, read, put = weakref.WeakKeyDictionary(), [], safetensors.TensorFiles.read, jax.device_put

    class Held(np.ndarray):
        """An array that can be counted."""

        __hash__ = object.__hash__

    def counted(self, name, *rest):
        value = read(self, name, *rest).view(Held)
        held[value] = value.nbytes
        most.append((len(held), sum(held.values())))
        return value

    gc.collect()
    monkeypatch.setattr(safetensors.TensorFiles, "read", counted)
    monkeypatch.setattr(jax, "device_put", lambda value, device: put(np.array(value), device))  # a CPU's device would share it
    checkpoint.load()
    assert len(most) > 150
    assert 1 < max(count for count, _ in most) <= IN_MEMORY
    assert max(size for _, size in most) <= memory_plan(checkpoint).loading


@pytest.mark.parametrize("mesh", ["tensor=8", "data=5", "data=3,tensor=2"])
def test_a_mesh_on_which_parts_are_unequal_is_refused_before_anything_is_read(stored, mesh):
    path, _, _ = stored("bf16")
    with pytest.raises(Unsupported, match="cannot be shared by"):
        opened(path, mesh)


def test_a_checkpoint_moves_to_other_devices_without_being_opened_again(stored, monkeypatch):
    path, _, _ = stored("bf16")
    one = Checkpoint(path)
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a file was opened"))
    several = one.on(Devices.of({"data": 2, "tensor": 4}))
    assert several.sources is one.sources
    assert several.dispatch.layout == (2, 4, 1)
    assert (one.layout, one.dispatch.layout) == ((1, 1, 1), (1, 1, 1))
    assert several.bytes() < one.bytes()


def test_a_plan_of_a_mesh_is_that_of_one_device(stored, monkeypatch):
    path, _, _ = stored("bf16")
    monkeypatch.setattr(planning, "free_memory", lambda: 8 << 30)
    one = memory_plan(Checkpoint(path), 100, batch=5, cache_tokens=1000)
    found = memory_plan(opened(path, "data=2,tensor=2"), 100, batch=5, cache_tokens=1000)
    assert (one.available, found.available) == (8 << 30, 2 << 30)
    assert (found.mesh, found.shards, found.rows) == ("data=2,tensor=2", 2, 64)
    assert (one.tokens, found.tokens) == (1024, 512)  # of a shard
    assert found.cache == one.cache // 5 * 3  # three of the five sequences
    assert found.fits
    lines = found.lines()
    assert lines[0] == "mesh data=2,tensor=2: per device"
    assert lines[2].startswith("cache of 3 x 100 tokens")
    assert any(line.startswith("read at a time, on the host") for line in lines)
    assert lines[-1].endswith("the cache of each of 2 shards holds 512 tokens of up to 64 sequences")
    assert memory_plan(opened(path, "data=2"), 100, batch=200).rows == 100
    context = memory_plan(opened(path, "tensor=2,context=2"), 100, batch=5)
    assert context.cache == one.cache // 2  # each has half of the tokens of every page
    naive = memory_plan(opened(path, "tensor=2", dispatch=Dispatch("naive")), 100)
    assert naive.cache == memory_plan(Checkpoint(path, dispatch=Dispatch("naive")), 100).cache // 2  # each caches its own heads


def test_a_plan_of_a_mesh_that_does_not_fit_says_what_would(stored, monkeypatch):
    path, _, _ = stored("bf16")
    checkpoint = opened(path, "data=2")
    needed = memory_plan(checkpoint, 100)
    monkeypatch.setattr(planning, "available", lambda devices: needed.weights)
    assert memory_plan(checkpoint, 100).advice() == [
        "it does not fit: take --dtype bfloat16, a larger --memory-fraction, or a mesh with more devices along tensor"
    ]
    monkeypatch.undo()
    few = memory_plan(checkpoint, 512, batch=4, cache_tokens=1024)
    assert few.advice() == ["it does not fit: --cache-tokens 1024 is less than 4 x 512 tokens"]


@pytest.mark.deep
@pytest.mark.parametrize("converts", [False, pytest.param(True, marks=SLOW)], ids=["released", "converted"])
def test_copies_of_experts_are_the_experts_bit_for_bit(tmp_path, converts):
    folder = released(tmp_path / "hf", "v3", "fp8")
    if converts:
        assert convert(folder, tmp_path / "orbax", "--mesh", "data=4") == 0
        folder = tmp_path / "orbax"
    devices = Devices.of({"data": 4})
    one, checkpoint = Checkpoint(folder).load(), Checkpoint(folder, devices=devices)
    slots = [5, 0, 1, 5, 2, 3, 5, 4, 6, 5, 7, 0]  # three a device
    many = checkpoint.with_copies({1: slots}).load()
    for name in ("gate", "up", "down"):
        whole, copied = (getattr(model.layers[1].mlp.experts, name).get_value() for model in (one, many))
        for expected, found in zip(whole.parts, copied.parts, strict=True):
            np.testing.assert_array_equal(np.asarray(expected)[slots].view(np.uint8), np.asarray(found).view(np.uint8))
    places = np.asarray(many.layers[1].mlp.places[...])
    assert places[5].tolist() == [0, 3, 6, 9]
    assert places[8].tolist() == [12] * 4  # no expert
    assert many.layers[2].mlp.places is None
