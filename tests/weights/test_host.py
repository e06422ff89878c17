"""Experts are packed for the CPU in the numbers they are stored in, of every kind of checkpoint; rates are measured once."""

import json
import re
from types import SimpleNamespace

import gguf
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx
from weights import as_gguf, fp8

import cpu_experts
from cpu_experts import blocks, library
from mla_jax.base import roofline
from mla_jax.base.errors import BadFile, BadRequest, DoesNotFit, Unsupported
from mla_jax.base.options import ExpertOptions
from mla_jax.engine.explain import explain
from mla_jax.model.ops import plain
from mla_jax.model.stream import held_bytes
from mla_jax.weights import host, measure, placement
from mla_jax.weights import plan as planning
from mla_jax.weights.load import Checkpoint, load
from mla_jax.weights.placement import place

V3 = {**models.FAMILIES["v3"], "num_hidden_layers": 2, "first_k_dense_replace": 1}
MANIFEST = "packed_experts.json"
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


def opened(path, *layers: int, precision: str | None = None, **options) -> Checkpoint:
    checkpoint = Checkpoint(path, **options)
    checkpoint.place(layers or checkpoint.layers_with_experts, precision)
    return checkpoint


def sums(layer, seed: int = 0) -> np.ndarray:
    """What a `cpu_experts.Experts` makes of random rows, experts of equal weight."""
    rng = np.random.default_rng(seed)
    x, ids = rng.standard_normal((5, layer.model), np.float32), rng.integers(0, layer.experts, (5, 2), np.int32)
    return layer.forward(x, ids, np.full((5, 2), 0.5, np.float32))


@pytest.mark.usefixtures("host_library")
def test_experts_come_to_the_host_as_they_are_stored_and_never_to_the_device(stored):
    path, precisions = stored
    checkpoint = opened(path)
    on_device, on_host = checkpoint.bytes(), checkpoint.bytes(host=True)
    model, whole = checkpoint.read(), load(path)
    blocks_of = [[*m.layers, *(further.block for further in m.mtp)] for m in (model, whole)]
    for number, (found, expected) in enumerate(zip(*blocks_of, strict=True)):
        if number in checkpoint.host:
            layer = found.mlp.experts.layer
            assert (layer.precision, layer.down_precision) == precisions
            host.offload(expected.mlp)
            np.testing.assert_array_equal(sums(layer), sums(expected.mlp.experts.layer))
    assert on_device == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert on_device + on_host <= Checkpoint(path).bytes() + 1  # floats are bfloat16 there, and float32 on a CPU device


@pytest.mark.usefixtures("host_library")
def test_what_is_planned_for_packed_experts_is_what_they_take(stored):
    """Also where down has a format of its own."""
    path, precisions = stored
    checkpoint = opened(path)
    layers = checkpoint.read().on_host()
    assert {checkpoint.precisions_on_host(number) for number in layers} == {precisions}
    assert placement._host_needs(checkpoint, layers) == sum(layer.nbytes for layer in layers.values())
    first = layers[min(layers)]
    assert placement._packed_bytes(checkpoint) * first.experts == first.nbytes


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_precision_that_is_asked_for_is_that_of_every_layer(tmp_path, precision):
    checkpoint = opened(fp8_blocks(tmp_path), precision=precision)
    (layer,) = checkpoint.read().on_host().values()
    assert (layer.precision, layer.down_precision) == (precision, precision)
    exact = load(checkpoint.source.path).layers[1].mlp.experts
    gate, up, down = (np.asarray(plain(w[...], jnp.dtype("float32"))) for w in (exact.gate, exact.up, exact.down))
    with cpu_experts.Experts(gate, up, down, precision) as expected:
        np.testing.assert_array_equal(sums(layer), sums(expected))


def test_formats_say_what_lies_on_the_host(tmp_path):
    checkpoint = opened(fp8_blocks(tmp_path))
    assert checkpoint.formats()["fp8_block on the host"] == checkpoint.bytes(host=True) == checkpoint.expert_bytes(1) > 0
    assert sum(checkpoint.formats().values()) == Checkpoint(checkpoint.source.path).bytes()


# kept in files


@pytest.mark.usefixtures("host_library")
def test_packed_experts_that_are_kept_are_mapped_at_the_next_start_and_not_read(stored, tmp_path, monkeypatch):
    path, _ = stored
    folder = tmp_path / "a folder" / "packed"
    first = opened(path)
    expected = {number: sums(layer) for number, layer in first.read(folder=folder).on_host().items()}
    assert sorted(p.name for p in folder.iterdir()) == [f"layer_{n:03d}.experts" for n in sorted(first.host)] + [MANIFEST]
    second, names = opened(path), []
    kind = type(second.source)
    read = kind.read
    monkeypatch.setattr(kind, "read", lambda self, name, *index: (names.append(name), read(self, name, *index))[1])
    again = second.read(folder=folder).on_host()
    theirs = {piece.name for slot, source in second.sources.items() if ".experts." in slot for piece in source.pieces}
    assert names
    assert theirs
    assert not theirs & set(names)
    for number, layer in again.items():
        np.testing.assert_array_equal(sums(layer), expected[number])


@pytest.mark.usefixtures("host_library")
def test_a_start_that_was_stopped_goes_on_where_it_was(tmp_path):
    path, folder = bf16(tmp_path / "m"), tmp_path / "packed"
    opened(path).read(folder=folder)
    (folder / "layer_002.experts").unlink()
    before = (folder / "layer_001.experts").stat()
    layers = opened(path).read(folder=folder).on_host()
    assert (folder / "layer_001.experts").stat() == before
    assert [*layers] == [1]  # the second is the MTP layer's
    assert (folder / "layer_002.experts").exists()


@pytest.mark.usefixtures("host_library")
def test_a_folder_of_something_else_is_left_alone(tmp_path):
    path, folder = bf16(tmp_path / "m"), tmp_path / "packed"
    opened(path).read(folder=folder)
    for others, said in (
        (opened(path, precision="int8"), "keeps packed experts of something else\n  what differs: precision"),
        (opened(fp8_blocks(tmp_path / "other")), "what differs: files"),
    ):
        with pytest.raises(BadFile, match=said):
            others.read(folder=folder)
    with pytest.raises(BadFile, match="is no folder of packed experts"):
        opened(path).read(folder=path)
    (folder / "layer_001.experts").write_bytes(b"cut short")
    with pytest.raises(BadFile, match=r"(?s)layer_001\.experts cannot be used.*delete it, and it is made again"):
        opened(path).read(folder=folder)


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
        host.Folder(tmp_path / path, {})


# placement


class OnGPU:
    """A checkpoint as a GPU with so many bytes would see it."""

    def __init__(self, monkeypatch, checkpoint: Checkpoint, room: float):
        checkpoint.target, checkpoint.device = SimpleNamespace(platform="gpu"), roofline.DEVICES["NVIDIA H200"]
        monkeypatch.setattr(planning, "available", lambda: int(room))
        monkeypatch.setattr(host, "refuse_without_library", lambda: None)
        monkeypatch.setattr(measure, "host", lambda *precisions: roofline.Host("a CPU", 1e11, 1e12, 1e-5, 2e-5, 5e10))


def test_experts_leave_a_gpu_from_the_last_layer_on_until_the_rest_fits(tmp_path, monkeypatch):
    hf = {**models.FAMILIES["v3"], "num_hidden_layers": 5, "first_k_dense_replace": 1}
    checkpoint = Checkpoint(models.write(tmp_path, hf, models.tensors(hf, mtp=True)))
    whole, each = planning.plan(checkpoint, 64).needed, checkpoint.expert_bytes(1)
    for less, expected in ((0, ()), (1, (5,)), (each, (5,)), (each + 1, (4, 5)), (4.5 * each, (1, 2, 3, 4, 5))):
        checkpoint.place(())
        OnGPU(monkeypatch, checkpoint, whole - less)
        placed = place(checkpoint, ExpertOptions(stream_tokens=0), 64)
        assert placed.host == expected == tuple(sorted(checkpoint.host))
        if expected:
            assert planning.plan(checkpoint, 64).fits


def test_a_cpu_device_keeps_its_experts_unless_asked(tmp_path):
    assert place(Checkpoint(bf16(tmp_path)), ExpertOptions()).host == ()


@pytest.mark.usefixtures("host_library")
def test_a_number_of_layers_overrides_the_decision_and_a_backend_keeps_all_on_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "host", lambda *precisions: roofline.Host("a CPU", 1e11, 1e12, 1e-5, 2e-5, 5e10))
    checkpoint = Checkpoint(bf16(tmp_path))
    assert place(checkpoint, ExpertOptions(host_layers=1)).host == (2,)
    assert place(checkpoint, ExpertOptions(experts="host")).host == (1, 2)
    assert place(checkpoint, ExpertOptions(experts="loop")).host == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host_layers": 3}, "host_layers is 3\n  the model has 2 layers with experts"),
        ({"host_layers": -1}, "host_layers is -1"),
        ({"host_precision": "int3"}, "host_precision int3 is not known\n  known: bf16, int8"),
        ({"defer": 3}, "defer is 3, expected 0 to 2"),
        ({"defer": -2}, "defer is -2, expected 0 to 2"),
        ({"stream_tokens": -1}, "stream_tokens is -1, expected 0 or more\n  0 stands for never"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(tmp_path, options, said):
    with pytest.raises(BadRequest, match=re.escape(said)):
        place(Checkpoint(bf16(tmp_path)), ExpertOptions(**options))


def test_a_model_without_experts_has_none_to_move(tmp_path):
    hf = models.FAMILIES["youtu"]
    with pytest.raises(BadRequest, match="no routed experts"):
        place(Checkpoint(models.write(tmp_path, hf, models.tensors(hf))), ExpertOptions(experts="host"))


def test_a_host_that_is_too_small_is_found_out_before_anything_is_read(tmp_path, monkeypatch):
    checkpoint = Checkpoint(bf16(tmp_path))
    OnGPU(monkeypatch, checkpoint, 1)
    monkeypatch.setattr(placement, "free_memory", lambda: 1000)
    with pytest.raises(
        DoesNotFit, match=r"do not fit the host's memory\n  2 layers take .* MiB while they are packed; 0\.0 MiB are free"
    ):
        place(checkpoint, ExpertOptions())


def test_without_the_library_the_error_says_how_to_build_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CPU_EXPERTS_LIBRARY", str(tmp_path / "none.so"))
    monkeypatch.setattr(cpu_experts, "load", library.load.__wrapped__)
    with pytest.raises(Unsupported, match=r"(?s)cannot be computed on the CPU here.*none\.so.*python -m cpu_experts\.build"):
        place(Checkpoint(bf16(tmp_path)), ExpertOptions(experts="host"))


def test_where_the_library_is_missing_experts_stay_on_the_device_unless_asked_for(tmp_path, monkeypatch):
    checkpoint = Checkpoint(bf16(tmp_path))
    OnGPU(monkeypatch, checkpoint, 1)

    def refuse():
        raise Unsupported("it is not built", "build it")

    monkeypatch.setattr(host, "refuse_without_library", refuse)
    placed = place(checkpoint, ExpertOptions())
    assert placed.host == () == tuple(checkpoint.host)
    assert "they stay on the device, for it is not built" in placed.why
    with pytest.raises(Unsupported, match="it is not built"):
        place(checkpoint, ExpertOptions(experts="host"))


def test_predictions_follow_from_what_host_and_device_reach(tmp_path, monkeypatch):
    checkpoint = Checkpoint(bf16(tmp_path), defer=1)
    OnGPU(monkeypatch, checkpoint, 1e9)
    placed = place(checkpoint, ExpertOptions(experts="host", defer=1))
    assert placed.lines[0] == "a CPU: 100.0 GB/s of experts, 1.00 TFLOP/s, 10 us a call, 20 for one that is waited for alone"
    assert re.fullmatch(
        r"predicted for 8 rows with 512 tokens held each: [\d,.]+ tok/s, a step 0\.\d ms, of which .* 0\.\d ms", placed.lines[2]
    )
    said = r"predicted for a prompt in chunks of 512 tokens: [\d,]+ tok/s; experts come to the device with "
    assert re.fullmatch(rf"{said}{checkpoint.stream:,} tokens or more over the link, 50\.0 GB/s", placed.lines[3])


def test_predictions_are_for_the_context_that_was_asked_for(tmp_path, monkeypatch):
    """Also with all on a GPU, but there neither for a backend that was asked for nor of weights other than bf16."""
    checkpoint, asked = Checkpoint(bf16(tmp_path), dtype="bfloat16"), ExpertOptions(experts="host")
    OnGPU(monkeypatch, checkpoint, 1e9)
    for context in (64, 400):
        step = roofline.decode_seconds(checkpoint.config, checkpoint.device, 1, context)
        said = f"predicted for 1 row with {context} tokens held: "
        assert place(checkpoint, asked, context).lines[1].startswith(said)
        checkpoint.place(())
        found = place(checkpoint, ExpertOptions(), context, 4).lines
        assert found[0] == f"{said}{1 / step:,.1f} tok/s, a step {step * 1e3:.1f} ms"
        assert [re.findall(r"for (\d+) row", line) for line in found] == [["1"], ["4"], ["8"]]
    assert place(checkpoint, ExpertOptions(experts="dense"), 64).lines == ()
    for path, dtype in ((fp8_blocks(tmp_path / "packed"), "bfloat16"), (checkpoint.source.path, "float32")):
        OnGPU(monkeypatch, other := Checkpoint(path), 1e9)
        other.dtype = jnp.dtype(dtype)
        assert place(other, ExpertOptions(), 64).lines == ()


def test_how_many_experts_are_deferred_and_copied_is_decided_for_the_context(tmp_path, monkeypatch):
    hf = {**models.FAMILIES["v3"], "num_hidden_layers": 5, "first_k_dense_replace": 1}
    checkpoint, asked = Checkpoint(models.write(tmp_path, hf, models.tensors(hf))), []
    OnGPU(monkeypatch, checkpoint, 1e9)
    for name, answer in (("best_defer", 0), ("decode_seconds", 1e-3)):
        monkeypatch.setattr(roofline, name, lambda config, on, rows, held, *rest, a=answer: asked.append(held) or a)
    place(checkpoint, ExpertOptions(experts="host", defer=-1, device_experts=2), 48)
    assert {*asked} == {48}


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "experts: loop for"),
        (1, "experts: those of MTP's layers on the CPU, which decoding does not run; loop for"),
        (2, "experts: those of 1 layer and of MTP's on the CPU; loop for"),
        (3, "experts: those of 2 layers and of MTP's on the CPU; loop for"),
        (5, "experts: those of all layers on the CPU: as asked"),
    ],
)
def test_what_lies_on_the_host_is_told_with_mtps_layers_apart(tmp_path, monkeypatch, count, said):
    monkeypatch.setattr(measure, "host", lambda *precisions: roofline.Host("a CPU", 1e11, 1e12, 1e-5, 2e-5, 5e10))
    hf = {**models.FAMILIES["v3"], "num_hidden_layers": 5, "first_k_dense_replace": 1}
    checkpoint = Checkpoint(models.write(tmp_path, hf, models.tensors(hf, mtp=True)))
    placed = place(checkpoint, ExpertOptions(host_layers=count))
    assert any(line.startswith(said) for line in explain(checkpoint.abstract, checkpoint.formats(), 64, placed))
    assert any(line.startswith("tok/s are not predicted on a CPU") for line in placed.lines) == (count > 0)


@pytest.mark.parametrize(
    ("asked", "layers", "bandwidth", "expected"),
    [(0, 5, 5e8, 0), (2, 5, 1e15, 2), (-1, 5, 5e8, 2), (-1, 5, 1e15, 0), (-1, 2, 5e8, 0)],
)
def test_as_many_experts_are_deferred_as_asked_or_as_are_predicted_to_gain(
    tmp_path, monkeypatch, asked, layers, bandwidth, expected
):
    """Of a slow host all that may be, of one that keeps nobody waiting none, and none of a layer with no other after it; on a
    CPU none unless asked for."""
    hf = {**models.FAMILIES["v3"], "num_hidden_layers": layers, "first_k_dense_replace": 1}
    checkpoint = Checkpoint(models.write(tmp_path, hf, models.tensors(hf)))
    assert checkpoint.abstract.defer == 0
    OnGPU(monkeypatch, checkpoint, 1e9)
    monkeypatch.setattr(measure, "host", lambda *precisions: roofline.Host("a CPU", bandwidth, bandwidth, 0, 0, 5e10))
    place(checkpoint, ExpertOptions(experts="host", defer=asked))
    assert checkpoint.defer == checkpoint.abstract.defer == expected


@pytest.mark.parametrize("asked", [None, 0, 1, 300])
def test_the_number_of_tokens_that_brings_experts_to_a_gpu_is_predicted_or_as_asked(tmp_path, monkeypatch, asked):
    checkpoint = Checkpoint(bf16(tmp_path))
    OnGPU(monkeypatch, checkpoint, 1e9)
    placed = place(checkpoint, ExpertOptions(experts="host", stream_tokens=asked))
    size = host.packed_bytes(checkpoint.config, "bf16")
    expected = (
        roofline.stream_tokens(checkpoint.config, checkpoint.device, measure.host("bf16"), size) if asked is None else asked
    )
    assert checkpoint.stream == checkpoint.abstract.stream == expected
    assert ("never over the link" in placed.lines[3]) == (not expected)


def test_experts_that_are_brought_to_a_gpu_have_room_there(tmp_path, monkeypatch):
    """A layer more leaves it, if need be; on a CPU they are never brought anywhere unless asked for."""
    hf = {**models.FAMILIES["v3"], "num_hidden_layers": 5, "first_k_dense_replace": 1}
    checkpoint = Checkpoint(models.write(tmp_path, hf, models.tensors(hf, mtp=True)))
    needed = planning.plan(checkpoint, 64).needed
    OnGPU(monkeypatch, checkpoint, needed - checkpoint.expert_bytes(1))
    assert place(checkpoint, ExpertOptions(stream_tokens=0), 64).host == (5,)
    before = planning.plan(checkpoint, 64).temporaries
    checkpoint.place(())
    assert len(place(checkpoint, ExpertOptions(stream_tokens=1), 64).host) > 1
    after = planning.plan(checkpoint, 64)
    assert after.fits
    assert after.temporaries - before == held_bytes(checkpoint.config, checkpoint.dtype.itemsize, 64)


@pytest.mark.usefixtures("host_library")
def test_a_cpu_device_brings_experts_nowhere_unless_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "host", lambda *precisions: roofline.Host("a CPU", 1e11, 1e12, 1e-5, 2e-5, 5e10))
    for asked in (None, 2):
        checkpoint = Checkpoint(bf16(tmp_path / str(asked)))
        place(checkpoint, ExpertOptions(experts="host", stream_tokens=asked))
        assert checkpoint.read().stream == (asked or 0)


# rates

SMALL = {"MODEL": 256, "WIDTH": 256, "MANY": 40, "EXPERTS": 12, "CACHES": 0}


@pytest.mark.usefixtures("host_library")
def test_rates_are_measured_once_and_again_if_the_file_is_damaged(tmp_path, monkeypatch):
    for name, size in SMALL.items():
        monkeypatch.setattr(measure, name, size)
    monkeypatch.setattr(measure, "cores", lambda: 3)
    path = tmp_path / "folder" / "host.json"
    first = measure.host("q4_k", cache=path)
    assert all(value > 0 for value in (first.bandwidth, first.flops, first.link))
    assert first.name == f"3 cores with {cpu_experts.isa()}, q4_k"
    assert len(json.loads(path.read_text())) == 1
    monkeypatch.setattr(measure, "measure", lambda *precisions: first._replace(name=str(precisions)))
    assert measure.host("q4_k", cache=path) == first
    assert measure.host("q4_k", "q4_k", cache=path) == first
    assert measure.host("int8", cache=path).name == "('int8', None)"
    assert measure.host("q4_k", "q6_k", cache=path).name == "('q4_k', 'q6_k')"
    assert measure.host("q4_k", cache=path) == first
    for damage in ("", "[1]", '{"a": 1}', path.read_text().replace("bandwidth", "width")):
        path.write_text(damage)
        assert measure.host("q4_k", cache=path).name == "('q4_k', None)"


@pytest.mark.usefixtures("host_library")
def test_rates_of_a_down_projection_in_its_own_format_are_of_both(tmp_path, monkeypatch):
    opened_with = []
    for name, size in SMALL.items():
        monkeypatch.setattr(measure, name, size)
    monkeypatch.setattr(
        measure, "_link_seconds", lambda layer, _: opened_with.append((layer.precision, layer.down_precision)) or 1.0
    )
    assert measure.host("q4_k", "q6_k", tmp_path / "host.json").name.endswith("q4_k and q6_k")
    assert {*opened_with} == {("q4_k", "q6_k")}
