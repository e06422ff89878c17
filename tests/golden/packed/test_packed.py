"""Folders whose weights other tools packed (see make.py): read bit for bit as these read them, with transformers' logits."""

import hashlib
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import models
import numpy as np
import pytest
from checkpoints import assert_same_model, convert, raw
from safetensors.numpy import load_file, save_file
from weights import as_gguf, parameters

from mla_jax import LLM
from mla_jax.base.errors import BadFile
from mla_jax.base.options import Options
from mla_jax.base.qtensor import QTensor, dequantize, reorder, validated
from mla_jax.base.quantization import NO_CACHE_SCALES, NO_INPUT_SCALES, Scheme
from mla_jax.engine.opening.opened import open_model
from mla_jax.mesh.devices import Devices
from mla_jax.model.parts import parts_of
from mla_jax.offload.place import Placement
from mla_jax.weights.boxes import blocks, box_shape, slices
from mla_jax.weights.layouts import layout_of
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.open import open_source
from mla_jax.weights.plan import memory_plan

HERE = Path(__file__).parent
FORMATS = {
    "int4_g32": "int4_g32",
    "int4_g128": "int4_g128",
    "int4_channel": "int4_g128",
    "int4_zeros": "uint4_g32",
    "fp8_channel": "fp8_row",
    "fp8_tensor": "fp8_block",
    "fp8_blocks": "fp8_block_16x16",
    "awq": "uint4_g32",
    "gptq": "uint4_g32",
    "gptq_v2": "uint4_g32",
    "nvfp4": "fp4_g16",
    "nvfp4_compressed": "fp4_g16_divided",
    "mxfp4": "MXFP4",
}
MOST = "awq"  # of the tests that compile a model: the one with the most on its way
each = pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == MOST else pytest.mark.deep) for n in FORMATS])


def test_there_is_a_folder_of_every_format():
    assert {path.name for path in HERE.iterdir() if (path / "config.json").exists()} == FORMATS.keys()


def numbers(value: np.ndarray, dtype: str) -> str:
    """A digest of the bits of all numbers; a zero has no sign."""
    wanted = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}[dtype]
    return hashlib.sha256((value + np.float32(0)).astype(wanted).tobytes()).hexdigest()[:16]


def unpacked(format: str, parts: tuple, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(dequantize(validated(QTensor(format, tuple(map(jnp.asarray, parts)), shape))))


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_has_the_numbers_that_the_tool_gives_bit_for_bit(name):
    source, prefix = open_source(HERE / name), "language_model." if name == "int4_g32" else ""
    expected = json.loads((HERE / name / "digests.json").read_text())
    packed = {n: entry for n, entry in source.tensors.items() if entry.format == FORMATS[name]}
    assert {prefix + n for n in expected} == packed.keys()
    for weight, (dtype, in_dtype, in_float32) in expected.items():
        entry = packed[prefix + weight]
        found = unpacked(entry.format, source.read(prefix + weight), entry.shape)
        assert numbers(found, "float32") == in_float32, weight
        assert numbers(found, dtype) == in_dtype, weight


@pytest.mark.parametrize("name", FORMATS)
def test_a_device_reads_its_part_of_a_weight_alone(name):
    source, read = open_source(HERE / name), 0
    packed = [(n, e) for n, e in source.tensors.items() if e.format == FORMATS[name]]
    for weight, (format, shape, *_) in [*packed[:6], packed[-1]]:
        whole = unpacked(format, source.read(weight), shape)
        (rows, columns), (r, c) = shape, blocks(format, 2)
        for box in [((r, rows), (0, columns)), ((3 * r, 5 * r), (0, columns)), ((0, rows), (c, columns))]:
            if all(start < end <= size for (start, end), size in zip(box, shape, strict=True)):
                found = unpacked(format, source.read(weight, None, box), box_shape(box))
                np.testing.assert_array_equal(found, whole[slices(box)])
                read += 1
    assert read or name == "fp8_tensor"  # whose blocks are larger than these matrices


@pytest.mark.deep
@pytest.mark.parametrize("name", FORMATS)
def test_conversion_keeps_every_weight_and_gives_the_files_bytes_back(name, tmp_path):
    assert convert(HERE / name, tmp_path / "out") == 0
    assert_same_model(HERE / name, tmp_path / "out")
    assert convert(tmp_path / "out", tmp_path / "back", "--to", "hf") == 0
    assert_same_model(HERE / name, tmp_path / "back")
    left_out = ("vision_tower.", "input_scale", "k_scale", "g_idx")
    stored = {n.removeprefix("language_model."): t for n, t in raw(HERE / name).items() if not any(s in n for s in left_out)}
    back = raw(tmp_path / "back")
    assert back.keys() == stored.keys()
    for tensor, (dtype, shape, data) in stored.items():
        assert (back[tensor][0], back[tensor][2]) == (dtype, data), tensor
        assert np.prod(back[tensor][1]) == np.prod(shape)


@each
def test_logits_equal_those_of_transformers_for_the_same_numbers(name):
    golden = np.load(HERE / name / "golden.npz")
    llm = LLM(HERE / name, dtype="float32")
    assert np.abs(llm.logits(golden["tokens"]) - golden["logits"]).max() < 1e-4 * golden["logits"].std()


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "int4_g128" else pytest.mark.deep) for n in FORMATS])
def test_two_devices_have_the_weights_of_one(name):
    model = Checkpoint(HERE / name, devices=Devices.of({"tensor": 2})).load()
    parameters.assert_equal(model, Checkpoint(HERE / name).load())


def test_the_formats_and_what_is_left_out_are_explained():
    llm = LLM(HERE / "nvfp4")
    said = llm.explain()
    assert "in fp4_g16" in said
    assert f"note: {NO_INPUT_SCALES}" in said
    assert f"note: {NO_CACHE_SCALES}" in said
    assert llm.plan.weights == sum(llm._formats.values())


WITH_KERNEL = "int4_g128"  # whose matrices alone fill a kernel's tiles


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_gpu_unpacks_before_every_product_is_named(name):
    said = open_model(Options.of(model=HERE / name, device="h200")).explain()
    unpacked = [line for line in said if "are unpacked before every product" in line]
    reordered = [line for line in said if "a kernel that unpacks them in registers" in line]
    if name == WITH_KERNEL:
        assert (len(unpacked), len(reordered)) == (0, 1)
    else:
        (line,) = unpacked
        assert f" in {FORMATS[name]} are unpacked before every product" in line
        assert reordered == []
    on_cpu = open_model(Options.of(model=HERE / name)).explain()
    assert not any("unpacked before every product" in line for line in on_cpu)


def test_a_packed_embedding_is_not_unpacked_as_a_whole(tmp_path):
    hf = {**as_gguf.full("v3"), "hidden_size": 64, "vocab_size": 128}
    tensors = as_gguf.gguf_tensors(hf, models.tensors(hf, mtp=True), "new")
    tensors["token_embd.weight"] = as_gguf.as_q8_0({"w": tensors["token_embd.weight"]})[0]["w"]
    file = as_gguf.write(tmp_path / "m.gguf", as_gguf.keyed(hf), tensors)
    said = open_model(Options.of(model=file, device="h200")).explain()
    assert "in Q8_0" in said[0]
    assert not any(line.startswith("packed weights: ") for line in said)


# ---- bytes that are planned


def bytes_of(values) -> dict[str, int]:
    """Bytes of arrays by number format; on a mesh those of its first device."""
    found: dict[str, int] = {}
    for value in values:
        name = value.format if isinstance(value, QTensor) else value.dtype.name
        own = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(value))
        found[name] = found.get(name, 0) + own
    return found


def weights_of(model) -> list:
    return jax.tree.leaves(parameters.state(model), is_leaf=lambda leaf: isinstance(leaf, QTensor))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_that_are_planned_are_those_of_the_arrays(name, devices):
    mesh = None if devices == 1 else Devices.of({"tensor": 2})
    checkpoint = Checkpoint(HERE / name, devices=mesh)
    found = bytes_of(weights_of(checkpoint.load()))
    assert checkpoint.formats() == found
    assert memory_plan(checkpoint).weights == sum(found.values())
    assert parts_of(checkpoint.model()).weight_bytes == sum(found.values())


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_that_are_planned_for_a_gpu_are_those_of_its_arrays(name):
    """Weights as they are on it: packed ones in the order of its kernels, if these take them, others in bfloat16."""
    opened = open_model(Options.of(model=HERE / name, device="h200"))
    planned = opened.checkpoint.parameters()
    loaded = parameters.by_path(Checkpoint(HERE / name).load())
    assert planned.keys() == loaded.keys()

    def on_gpu(path: str):
        if isinstance(loaded[path], QTensor):
            return reorder(loaded[path]) if planned[path].reordered else loaded[path]
        return loaded[path].astype(planned[path].dtype)

    assert opened.formats() == bytes_of(map(on_gpu, planned))
    assert opened.plan.weights == sum(opened.formats().values())
    first = opened.explain()[0]
    assert all(f" in {format}" in first for format in opened.formats())


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_of_experts_on_the_host_are_those_that_are_read(name):
    checkpoint = Checkpoint(HERE / name)
    placement = Placement(host=tuple(checkpoint.experts))
    paths = [path for layer in checkpoint.experts.values() for path in layer.values()]
    on_host = checkpoint.parameters(placement)
    loaded = parameters.by_path(Checkpoint(HERE / name).load())

    def read(path: str):
        if isinstance(on_host[path], QTensor):
            return loaded[path]
        return jnp.asarray(dequantize(loaded[path]), jnp.bfloat16)

    found = bytes_of(map(read, paths))
    assert checkpoint.bytes(placement, host=True) == sum(found.values())
    assert {f"{format} on the host": size for format, size in found.items()}.items() <= checkpoint.formats(placement).items()


# ---- folders that are not what they say

DOWN = "model.layers.1.mlp.experts.0.down_proj."
FAULTS = {
    "scales": ("awq", lambda t: t.pop(DOWN + "scales"), "down_proj.qweight is I32 without scales", DOWN + "scales"),
    "zeros": ("gptq", lambda t: t.pop(DOWN + "qzeros"), "down_proj.qweight is I32 without qzeros", DOWN + "qzeros"),
    "sizes": ("int4_g128", lambda t: t.pop(DOWN + "weight_shape"), "is I32 without weight_shape", DOWN + "weight_shape"),
    "powers": ("mxfp4", lambda t: t.pop(DOWN + "weight_scale"), "weight_packed is U8 without weight_scale", DOWN),
    "groups": (
        "awq",
        lambda t: t.update({DOWN + "scales": t[DOWN + "scales"][:, :-1]}),
        "down_proj.scales does not fit",
        "[64, 64] in blocks of [1, 64] needs [1, 64] of F32 or BF16 or F16 or F8_E8M0, found F16 [1, 63]",
    ),
    "order": (
        "int4_g128",
        lambda t: t.update({DOWN + "weight_g_idx": np.arange(128, dtype=np.int32)}),
        "the tensors do not fit",
        "not used: " + DOWN + "weight_g_idx",
    ),
    "other_sizes": (
        "int4_channel",
        lambda t: t.update({DOWN + "weight_shape": np.array([64, 90])}),
        "weight_packed",
        "[64, 90] in blocks of [1, 8] needs [64, 12] of I32, found I32 [64, 5]",
    ),
    "scalar": (
        "int4_g128",
        lambda t: t.update({DOWN + "weight_scale": np.ones((), ml_dtypes.bfloat16)}),
        "weight_scale does not fit",
        "needs [128, 1] of BF16, found BF16",
    ),
    "odd": (
        "awq",
        lambda t: t.update({DOWN + "qweight": t[DOWN + "qweight"][:-1]}),
        "is not packed as its quantiser packs",
        "[64, 63] has no whole groups of 64 columns",
    ),
    "flat": (
        "gptq",
        lambda t: t.update({DOWN + "qweight": t[DOWN + "qweight"].reshape(-1)}),
        "does not fit",
        "expected a matrix",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_without_a_tensor_or_with_another_one_is_refused_by_name(fault, tmp_path):
    name, change, *words = FAULTS[fault]
    tensors = {k: v.copy() for k, v in load_file(HERE / name / "model.safetensors").items()}
    change(tensors)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, tmp_path / "model.safetensors")
    shutil.copy(HERE / name / "config.json", tmp_path)
    with pytest.raises(BadFile) as caught:
        Checkpoint(tmp_path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_sizes_that_are_not_those_of_the_words_are_refused_when_they_are_read(tmp_path):
    tensors = load_file(HERE / "int4_g128" / "model.safetensors") | {DOWN + "weight_shape": np.array([128, 127])}
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(HERE / "int4_g128" / "config.json", tmp_path)
    with pytest.raises(BadFile, match=r"weight_shape does not fit .*\n.*found \[128, 127\], they have \[128, 128\]"):
        open_source(tmp_path).read(DOWN + "weight")


def test_a_scale_that_is_nan_is_zero_where_all_codes_are():
    pairs, nan = np.zeros((2, 16), np.uint8), np.full((2, 2), np.nan, ml_dtypes.float8_e4m3fn)
    pairs[0, :8], pairs[1, 8] = 0x80, 0x10  # a negative zero, and a one
    _, scale, _ = layout_of(Scheme("nvfp4", (1, 16))).unpack((pairs, nan, np.ones((1, 1), np.float32)), (2, 32))
    np.testing.assert_array_equal(np.isnan(scale.astype(np.float32)), [[False, False], [False, True]])
