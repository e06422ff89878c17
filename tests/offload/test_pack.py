"""Experts are packed for the CPU in the numbers they are stored in, of every kind of checkpoint, and kept in files."""

from pathlib import Path
from typing import NamedTuple

import gguf
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from offloaded import offload
from weights import as_gguf, fp8

import cpu_experts
from cpu_experts import blocks
from mla_jax import Transformer
from mla_jax.base.errors import BadFile, BadRequest
from mla_jax.model.ops import plain
from mla_jax.offload import streaming
from mla_jax.offload.place import Placement
from mla_jax.weights.load import Checkpoint, load
from mla_jax.weights.packed_folder import PACKED_MANIFEST, PackedFolder

V3 = {**models.FAMILIES["v3"], "num_hidden_layers": 2, "first_k_dense_replace": 1}
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256}


def bf16(folder):
    return models.write(folder, V3, models.tensors(V3, mtp=True))


def fp8_blocks(folder):
    hf = {**V3, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    return models.write(folder, hf, fp8.quantized(models.tensors(hf), (128, 128)))


def q8_0(folder):
    hf = {**as_gguf.full("v3"), "hidden_size": 64, "moe_intermediate_size": 32, "num_nextn_predict_layers": 0}
    packed, _ = as_gguf.as_q8_0(as_gguf.gguf_tensors(hf, models.tensors(hf), "new"))
    return as_gguf.write(folder / "m.gguf", as_gguf.keyed(hf), packed)


def k_quants(folder):
    """Q4_K, and Q6_K for down, as llama.cpp's Q4_K_M has them."""
    hf = {**as_gguf.full("v3"), **WIDE, "num_nextn_predict_layers": 0}
    tensors = as_gguf.gguf_tensors(hf, models.tensors(hf), "new")
    for name, value in tensors.items():
        if "_exps" in name:
            kind = gguf.GGMLQuantizationType.Q6_K if "down" in name else gguf.GGMLQuantizationType.Q4_K
            packed = blocks.quantize(np.asarray(value, np.float32), kind.name.lower())
            tensors[name] = packed.reshape(*value.shape[:-1], -1), kind
    return as_gguf.write(folder / "m.gguf", as_gguf.keyed(hf), tensors)


STORED = {bf16: ("bf16", "bf16"), fp8_blocks: ("fp8_block", "fp8_block"), q8_0: ("q8_0", "q8_0"), k_quants: ("q4_k", "q6_k")}


@pytest.fixture(params=STORED, ids=lambda function: function.__name__)
def stored(request, tmp_path):
    """A checkpoint, and what its experts are computed in."""
    return request.param(tmp_path), STORED[request.param]


class Opened(NamedTuple):
    """A checkpoint with the experts of all its layers on the host."""

    checkpoint: Checkpoint
    placement: Placement

    def load(self, folder: Path | None = None) -> Transformer:
        return self.checkpoint.load(self.placement, folder=folder)


def opened(path: Path, precision: str | None = None) -> Opened:
    checkpoint = Checkpoint(path)
    return Opened(checkpoint, Placement(tuple(checkpoint.experts), precision))


def sums(layer, seed: int = 0) -> np.ndarray:
    """The outputs of a `cpu_experts.Experts` for random rows, experts of equal weight."""
    rng = np.random.default_rng(seed)
    x, ids = rng.standard_normal((5, layer.model), np.float32), rng.integers(0, layer.experts, (5, 2), np.int32)
    return layer.forward(x, ids, np.full((5, 2), 0.5, np.float32))


@pytest.mark.usefixtures("host_library")
def test_experts_come_to_the_host_as_they_are_stored_and_never_to_the_device(stored):
    path, precisions = stored
    checkpoint, placement = opened(path)
    on_device, on_host = checkpoint.bytes(placement), checkpoint.bytes(placement, host=True)
    model, exact = checkpoint.load(placement), load(path)
    for number, (found, expected) in enumerate(zip(model.blocks(), exact.blocks(), strict=True)):
        if number in placement.host:
            layer = found.mlp.experts.layer
            assert (layer.precision, layer.down_precision) == precisions
            offload(expected.mlp)
            np.testing.assert_array_equal(sums(layer), sums(expected.mlp.experts.layer))
    assert on_device == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert on_device + on_host <= Checkpoint(path).bytes() + 1  # floats are bfloat16 there, and float32 on a CPU device


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
def test_what_is_planned_for_packed_experts_is_what_they_take(stored):
    """Also where down has a format of its own."""
    path, precisions = stored
    checkpoint, placement = opened(path)
    planned = {layer.number: layer for layer in checkpoint.expert_layers()}
    layers = checkpoint.load(placement).on_host()
    for number, layer in layers.items():
        packing = planned[number].packing
        assert (packing.precision, packing.down_precision) == precisions
        assert packing == streaming.Packing.of(layer)
        assert planned[number].host_bytes == layer.nbytes
    assert layers


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_precision_that_is_asked_for_is_that_of_every_layer(tmp_path, precision):
    path = fp8_blocks(tmp_path)
    (layer,) = opened(path, precision).load().on_host().values()
    assert (layer.precision, layer.down_precision) == (precision, precision)
    exact = load(path).layers[1].mlp.experts
    gate, up, down = (np.asarray(plain(w[...], jnp.dtype("float32"))) for w in (exact.gate, exact.up, exact.down))
    with cpu_experts.Experts(gate, up, down, precision) as expected:
        np.testing.assert_array_equal(sums(layer), sums(expected))


def test_formats_say_what_lies_on_the_host(tmp_path):
    checkpoint, placement = opened(fp8_blocks(tmp_path))
    (layer,) = checkpoint.expert_layers()
    assert checkpoint.formats(placement)["fp8_block on the host"] == layer.device_bytes > 0
    assert checkpoint.bytes(placement, host=True) == layer.device_bytes
    assert sum(checkpoint.formats(placement).values()) == checkpoint.bytes() == sum(checkpoint.formats().values())


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("kept", STORED, ids=lambda function: function.__name__)
def test_replicas_of_every_kind_of_checkpoint_are_what_the_host_has(kept, tmp_path):
    """As numbers except for FP8, also from mapped files."""
    path, folder, ids = kept(tmp_path), tmp_path / "packed", (2, 7)
    for _ in range(2):
        checkpoint = Checkpoint(path)
        placement = Placement((1,), replicated={1: ids})
        model = checkpoint.model(placement)
        experts, planned = (m.layers[1].mlp.experts for m in (checkpoint.load(placement, folder=folder), model))
        found, shapes = (
            [w.get_value() for w in (e.replicated.gate, e.replicated.up, e.replicated.down)] for e in (experts, planned)
        )
        everything = streaming.stacks(experts.layer, 0, experts.layer.experts, checkpoint.dtype)
        for copied, shape, stack in zip(found, shapes, everything, strict=True):
            assert jax.eval_shape(lambda w=copied: w) == shape
            numbers = [np.asarray(plain(w, checkpoint.dtype)) for w in (copied, stack)]
            np.testing.assert_array_equal(numbers[0].view(np.uint8), numbers[1][list(ids)].view(np.uint8))
        taken = sum(leaf.nbytes for leaf in jax.tree.leaves(found))
        assert checkpoint.formats(placement)["replicated experts"] == taken
        assert checkpoint.bytes(placement) - checkpoint.bytes(Placement((1,))) == taken
        assert model.replicated == 2


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
def test_a_model_without_weights_has_the_stacks_of_the_loaded_one(stored):
    """So that `--dry-run` says what runs."""
    checkpoint, placement = opened(stored[0])
    model, loaded = checkpoint.model(placement), checkpoint.load(placement)
    for number in placement.host:
        found = [m.blocks()[number].mlp.experts.stacks(checkpoint.dtype)["streamed"] for m in (model, loaded)]
        assert found[0] == found[1]


# kept in files


@pytest.mark.usefixtures("host_library")
def test_packed_experts_that_are_kept_are_mapped_at_the_next_start_and_not_read(stored, tmp_path, monkeypatch):
    path, _ = stored
    folder = tmp_path / "a folder" / "packed"
    first = opened(path)
    expected = {number: sums(layer) for number, layer in first.load(folder).on_host().items()}
    assert sorted(p.name for p in folder.iterdir()) == [f"layer_{n:03d}.experts" for n in sorted(first.placement.host)] + [
        PACKED_MANIFEST
    ]
    second, names = opened(path), []
    kind = type(second.checkpoint.source)
    read = kind.read
    monkeypatch.setattr(kind, "read", lambda self, name, *index: (names.append(name), read(self, name, *index))[1])
    again = second.load(folder).on_host()
    theirs = {piece.name for slot, source in second.checkpoint.sources.items() if ".experts." in slot for piece in source.pieces}
    assert names
    assert theirs
    assert not theirs & set(names)
    for number, layer in again.items():
        np.testing.assert_array_equal(sums(layer), expected[number])


@pytest.mark.usefixtures("host_library")
def test_a_start_that_was_stopped_goes_on_where_it_was(tmp_path):
    path, folder = bf16(tmp_path / "m"), tmp_path / "packed"
    opened(path).load(folder)
    (folder / "layer_002.experts").unlink()
    before = (folder / "layer_001.experts").stat()
    layers = opened(path).load(folder).on_host()
    assert (folder / "layer_001.experts").stat() == before
    assert [*layers] == [1]  # the second is the MTP layer's
    assert (folder / "layer_002.experts").exists()


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
def test_a_folder_of_something_else_is_left_alone(tmp_path):
    path, folder = bf16(tmp_path / "m"), tmp_path / "packed"
    opened(path).load(folder)
    for others, said in (
        (opened(path, precision="int8"), "keeps packed experts of something else\n  what differs: precision"),
        (opened(fp8_blocks(tmp_path / "other")), "what differs: files"),
    ):
        with pytest.raises(BadFile, match=said):
            others.load(folder)
    with pytest.raises(BadFile, match="is no folder of packed experts"):
        opened(path).load(path)
    (folder / "layer_001.experts").write_bytes(b"cut short")
    with pytest.raises(BadFile, match=r"(?s)layer_001\.experts cannot be used.*delete it, and it is made again"):
        opened(path).load(folder)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/proc/x", "No such file or directory"),
        ("file", "File exists"),
        ("file/sub", "Not a directory"),
        ("a\0b", "embedded null"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, path, reason):
    (tmp_path / "file").write_text("")
    said = rf"cannot keep packed experts: {reason}.*\n  expected a folder .*\n  choose another host_folder"
    with pytest.raises(BadRequest, match=said):
        PackedFolder(tmp_path / path, {})
