"""GGUF files as the gguf package writes them, read by us; their metadata as a config, their tensors as our parameters."""

import contextlib
import dataclasses
import re
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import ml_dtypes
import models
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from weights.as_gguf import converted, full, gguf_tensors, write

from mla_jax.base import axes
from mla_jax.base.config import Config
from mla_jax.base.errors import BadConfig, BadFile, Unsupported
from mla_jax.base.families import PRESETS
from mla_jax.model.transformer import Transformer
from mla_jax.weights import gguf_config, gguf_names
from mla_jax.weights.gguf import GGUFFile, open_gguf
from mla_jax.weights.gguf_header import SCALARS, TENSOR_TYPES
from mla_jax.weights.hf_names import HF

Kind, Block = gguf.GGUFValueType, gguf.GGMLQuantizationType
RNG = np.random.default_rng(0)


def read_all(opened: GGUFFile) -> dict[str, np.ndarray]:
    found = {name: opened.read(name) for name in opened.tensors}
    opened.close()
    return found


# ---- metadata

LIMITS = {kind: np.iinfo(np.dtype(number)) for kind, number in SCALARS.items() if np.dtype(number).kind in "iu"}


@pytest.mark.parametrize("kind", LIMITS)
def test_whole_numbers_of_every_size_come_back(tmp_path, kind):
    low, high = int(LIMITS[kind].min), int(LIMITS[kind].max)
    written = {"low": (low, Kind(kind)), "high": (high, Kind(kind)), "all": ([low, high, 7], Kind.ARRAY, Kind(kind))}
    found = open_gguf(write(tmp_path / "m.gguf", written)).metadata
    assert (found["low"], found["high"], found["all"].tolist()) == (low, high, [low, high, 7])
    assert type(found["low"]) is int
    assert found["all"].dtype == SCALARS[kind]


def test_fractions_truths_and_texts_come_back(tmp_path):
    written = {
        "f32": (1e-6, Kind.FLOAT32),
        "f64": (1e-300, Kind.FLOAT64),
        "f32s": ([0.5, 1e30], Kind.ARRAY, Kind.FLOAT32),
        "f64s": ([0.1, -0.0], Kind.ARRAY, Kind.FLOAT64),
        "yes": (True, Kind.BOOL),
        "truths": ([True, False], Kind.ARRAY),
        "text": ("a\0é中😀", Kind.STRING),
        "texts": (["", "▁", "a b"], Kind.ARRAY),
    }
    found = open_gguf(write(tmp_path / "m.gguf", written)).metadata
    assert found.pop("general.architecture") == "deepseek2"
    assert found["f32"] == float(np.float32(1e-6))
    assert found["f64"] == 1e-300
    assert found["f32s"].tolist() == [0.5, float(np.float32(1e30))]
    assert found["f64s"].tolist() == [0.1, -0.0]
    assert found["yes"] is True
    assert found["truths"].tolist() == [True, False]
    assert (found["text"], found["texts"]) == ("a\0é中😀", ["", "▁", "a b"])


def test_arrays_of_arrays_come_back(tmp_path):
    written = {"numbers": ([[1, 2], [3]], Kind.ARRAY), "texts": ([["a"], ["b", "c"]], Kind.ARRAY)}
    found = open_gguf(write(tmp_path / "m.gguf", written)).metadata
    assert [row.tolist() for row in found["numbers"]] == [[1, 2], [3]]
    assert found["texts"] == [["a"], ["b", "c"]]


scalars = st.one_of(
    st.tuples(st.integers(-128, 127), st.just(Kind.INT8)),
    st.tuples(st.integers(0, 2**64 - 1), st.just(Kind.UINT64)),
    st.tuples(st.floats(width=32, allow_nan=False), st.just(Kind.FLOAT32)),
    st.tuples(st.booleans(), st.just(Kind.BOOL)),
    st.tuples(st.text(min_size=1).filter(lambda t: not re.search("[\ud800-\udfff]", t)), st.just(Kind.STRING)),
)


@given(
    values=st.lists(scalars, max_size=5),
    shapes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), max_size=5),
    alignment=st.sampled_from([8, 32, 64]),
)
@settings(max_examples=100)
def test_files_are_read_as_the_gguf_package_reads_them(values, shapes, alignment):
    tensors = {f"t{i}": RNG.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "m.gguf", {f"k{i}": v for i, v in enumerate(values)}, tensors, alignment=alignment)
        opened, reader = open_gguf(path), gguf.GGUFReader(path)
        assert opened.metadata["general.alignment"] == alignment
        for i, (value, _) in enumerate(values):
            assert opened.metadata[f"k{i}"] == value == reader.fields[f"k{i}"].contents()
        assert [*opened.tensors] == [t.name for t in reader.tensors]
        for theirs in reader.tensors:
            ours = opened.tensors[theirs.name]
            assert (ours.offset, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)
            np.testing.assert_array_equal(opened.read(theirs.name), tensors[theirs.name])
        opened.close()


# ---- tensors


def test_the_types_are_those_of_the_gguf_package():
    sizes = {block.name: (int(block), *size) for block, size in gguf.GGML_QUANT_SIZES.items()}
    known = {name: tuple(kind[:3]) for name, kind in TENSOR_TYPES.items() if name != "Q2_0"}  # unknown to the package
    assert known == {name: sizes[name] for name in known}
    assert sizes.keys() - TENSOR_TYPES.keys() <= {"Q8_1", "Q8_K", "Q1_0"}  # no weights are stored in the first two


@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i1", "i2", "i4", "i8"])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 5), (2, 1, 3, 2)], ids=str)
def test_plain_tensors_come_back_bit_for_bit(tmp_path, dtype, shape):
    data = (RNG.standard_normal(shape) * 50).astype(dtype)
    found = read_all(open_gguf(write(tmp_path / "m.gguf", tensors={"a": data, "b": data[::-1]})))
    assert found["a"].dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found["a"], data)
    np.testing.assert_array_equal(found["b"], data[::-1])


def test_bfloat16_comes_back_bit_for_bit(tmp_path):
    data = RNG.standard_normal((3, 5)).astype(ml_dtypes.bfloat16)
    opened = open_gguf(write(tmp_path / "m.gguf", tensors={"a": (data.view(np.uint8), Block.BF16)}))
    assert opened.tensors["a"].shape == (3, 5)
    np.testing.assert_array_equal(opened.read("a"), data)


@pytest.mark.parametrize("name", [name for name, kind in TENSOR_TYPES.items() if kind.dtype is None and name != "Q2_0"])
def test_blocks_come_back_as_bytes(tmp_path, name):
    _, values, size, _ = TENSOR_TYPES[name]
    data = RNG.integers(0, 256, (2, 3, 4 * size), np.uint8)
    opened = open_gguf(write(tmp_path / "m.gguf", tensors={"a": (data, Block[name]), "b": np.ones(3, np.float32)}))
    info = opened.tensors["a"]
    assert (info.shape, info.type, info.nbytes) == ((2, 3, 4 * values), name, data.size)
    np.testing.assert_array_equal(opened.read("a"), data.reshape(2, 3, 4, size))


@pytest.mark.parametrize("name", ["F32", "Q4_K"])
def test_one_entry_of_the_first_axis_is_read_alone(tmp_path, name):
    size = TENSOR_TYPES[name].bytes if TENSOR_TYPES[name].dtype is None else 20
    data = RNG.integers(0, 256, (4, 3, size), np.uint8)
    opened = open_gguf(write(tmp_path / "m.gguf", tensors={"a": np.ones(3, np.float32), "b": (data, Block[name])}))
    whole = opened.read("b").view(np.uint8)
    for i in range(4):
        np.testing.assert_array_equal(opened.read("b", i).view(np.uint8), whole[i])
    for entry, tensor in ((4, "b"), (-1, "b"), (3, "a")):
        with pytest.raises(IndexError, match=f"no entry {entry}"):
            opened.read(tensor, entry)
    opened.close()


def test_version_2_is_read_as_version_3(tmp_path):
    path = write(tmp_path / "m.gguf", {"k": ("v", Kind.STRING)}, {"a": np.arange(5, dtype=np.float32)})
    data = path.read_bytes()
    path.write_bytes(data[:4] + struct.pack("<I", 2) + data[8:])
    opened = open_gguf(path)
    assert opened.metadata["k"] == "v"
    np.testing.assert_array_equal(opened.read("a"), np.arange(5))


@pytest.mark.parametrize("alignment", [8, 16, 4096])
def test_other_alignments_are_read(tmp_path, alignment):
    tensors = {f"t{n}": np.arange(n, dtype=np.float32) for n in (1, 5, 3)}
    opened = open_gguf(write(tmp_path / "m.gguf", tensors=tensors, alignment=alignment))
    assert all(info.offset % alignment == 0 for info in opened.tensors.values())
    for name, value in read_all(opened).items():
        np.testing.assert_array_equal(value, tensors[name])


@pytest.mark.parametrize("swapped", [gguf.GGUFEndian.BIG])
def test_a_big_endian_file_is_named_as_such(tmp_path, swapped):
    with pytest.raises(BadFile, match="big-endian"):
        open_gguf(write(tmp_path / "m.gguf", tensors={"a": np.ones(3, np.float32)}, endianess=swapped))


def test_several_threads_read_at_once(tmp_path):
    tensors = {f"t{i}": RNG.standard_normal((50, i + 1)).astype(np.float32) for i in range(40)}
    write(tmp_path / "m", tensors=tensors, split_max_tensors=10)
    opened = open_gguf(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        for name, found in zip([*tensors] * 5, pool.map(opened.read, [*tensors] * 5), strict=True):
            np.testing.assert_array_equal(found, tensors[name])
    opened.close()


# ---- parts


@pytest.mark.parametrize("first", [False, True], ids=["tensors in all", "none in the first"])
@pytest.mark.parametrize("name", ["m-00001-of-0000{}.gguf", "m-00002-of-0000{}.gguf", ""])
def test_a_model_in_parts_is_opened_by_any_part_and_by_its_folder(tmp_path, name, first):
    tensors = {f"t{i}": np.full(i + 1, i, np.float32) for i in range(5)}
    write(tmp_path / "m", {"k": ("v", Kind.STRING)}, tensors, split_max_tensors=2, small_first_shard=first)
    opened = open_gguf(tmp_path / name.format(3 + first))
    assert (opened.metadata["k"], opened.path.name) == ("v", f"m-00001-of-0000{3 + first}.gguf")
    found = read_all(opened)
    assert [*found] == [*tensors]
    for key, value in found.items():
        np.testing.assert_array_equal(value, tensors[key])


def test_a_merged_file_whose_count_of_parts_is_0_is_read(tmp_path):
    numbers = {"split.no": (0, Kind.UINT16), "split.count": (0, Kind.UINT16), "split.tensors.count": (1, Kind.INT32)}
    assert [*open_gguf(write(tmp_path / "m.gguf", numbers, {"a": np.ones(2, np.float32)})).tensors] == ["a"]


def test_a_path_that_leads_nowhere_is_an_error(tmp_path):
    with pytest.raises(BadFile, match=r"does not exist\n.*expected a \.gguf file"):
        open_gguf(tmp_path / "none.gguf")


def test_a_folder_with_two_models_asks_which(tmp_path):
    path = write(tmp_path / "a.gguf")
    shutil.copy(path, tmp_path / "b.gguf")
    with pytest.raises(BadFile, match=r"holds 2 GGUF models\n  a.gguf\n  b.gguf\n  name the file"):
        open_gguf(tmp_path)


# ---- the config


def names_of(hf: dict) -> set[str]:
    return {"token_embd.weight"} | (set() if hf["tie_word_embeddings"] else {"output.weight"})


def assert_same(found: Config, hf: dict):
    """Equal in all that the metadata can say."""
    expected = dataclasses.asdict(Config.from_hf({k: v for k, v in hf.items() if k != "quantization_config"}))
    ours = dataclasses.asdict(found)
    skipped = {"model_type", "notes"} | (
        set() if found.n_routed_experts else {"topk_method", "scoring_func", "first_k_dense_replace"}
    )
    if not found.n_routed_experts:
        skipped |= {"n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "num_experts_per_tok"}
        skipped |= {"n_shared_experts", "moe_intermediate_size", "moe_layer_freq"}
    ones = {"n_group", "topk_group"} if (found.n_group or 1) == (expected["n_group"] or 1) == 1 else set()
    assert {k: v for k, v in ours.items() if k not in skipped | ones} == {
        k: v for k, v in expected.items() if k not in skipped | ones
    }


RELEASES = [*models.IN_GGUF, *(name.upper() for name in PRESETS if name in models.IN_GGUF)]


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
@pytest.mark.parametrize("name", RELEASES)
def test_the_config_of_every_family_comes_back(name, old):
    hf = full(name)
    found = gguf_config.config(converted(hf, old), names_of(hf))
    assert_same(found, hf)
    assert found.notes == ()


def test_numbers_are_the_decimals_of_config_json():
    hf = full("v2_lite")
    found = gguf_config.config(converted(hf), names_of(hf))
    assert (found.rms_norm_eps, found.rope_scaling.mscale_all_dim, found.rope_scaling.factor) == (1e-6, 0.707, 40)


@pytest.mark.parametrize(("name", "groups"), [("V3", (8, 4)), ("V2", (8, 3)), ("KIMI_K2", (1, 1)), ("V2_LITE", (1, 1))])
def test_files_that_do_not_name_the_groups_of_experts_take_those_of_the_release(name, groups):
    hf = full(name)
    metadata = {k: v for k, v in converted(hf).items() if "expert_group" not in k}
    found = gguf_config.config(metadata, names_of(hf))
    assert (found.n_group, found.topk_group) == groups
    assert bool(found.notes) == (groups != (1, 1))


def test_glms_files_do_not_name_the_gate():
    hf = full("glm_4_7_flash") | {"vocab_size": 154880}
    metadata = {k: v for k, v in converted(hf).items() if "gating" not in k}
    assert gguf_config.config(metadata, {"output.weight"}).scoring_func == "sigmoid"


def test_glm_5_2_is_told_by_its_context_where_the_file_does_not_name_layers_with_indexers():
    hf = full("GLM_5_2")
    metadata = {k: v for k, v in converted(hf).items() if "types" not in k}
    found = gguf_config.config(metadata, names_of(hf))
    assert found.indexer_types == tuple(hf["indexer_types"])
    assert ["assumed to be those of GLM-5.2" in note for note in found.notes] == [True]
    shorter = gguf_config.config(metadata | {"glm-dsa.context_length": 202752}, names_of(hf))
    assert (shorter.indexer_types, shorter.notes) == (None, ())


def test_indexers_of_layers_that_share_a_choice_are_ignored_with_a_note():
    hf = full("glm_5")
    surplus = {f"blk.{layer}.indexer.attn_k.weight" for layer in range(5)}
    (note,) = gguf_config.config(converted(hf), {*names_of(hf), *surplus}).notes
    assert "indexers of 2 layers are not used" in note
    config = Config.from_hf(hf)
    assert [gguf_names.GGUF.needless(name, config, ()) for name in sorted(surplus)] == [False, False, True, True, False]


def test_blocks_count_the_mtp_layers():
    hf = full("v3") | {"num_nextn_predict_layers": 1}
    metadata = converted(hf)
    found = gguf_config.config(metadata, {"output.weight"})
    assert metadata["deepseek2.block_count"] == found.num_hidden_layers + 1
    assert found.num_nextn_predict_layers == 1


def test_one_value_a_layer_is_one_value_if_all_are_equal():
    hf = full("v3")
    layers = {"deepseek2.attention.head_count": np.full(5, hf["num_attention_heads"], np.int32)}
    assert_same(gguf_config.config(converted(hf) | layers, {"output.weight"}), hf)
    layers["deepseek2.attention.head_count"][0] = 7
    with pytest.raises(BadConfig, match=r"attention\.head_count is .*expected an integer"):
        gguf_config.config(converted(hf) | layers, {"output.weight"})


def test_ends_of_turns_are_ends_too_and_unknown_keys_are_noted():
    hf, more = full("v3"), {"tokenizer.ggml.eot_token_id": 5, "deepseek2.new_feature": 1, "general.name": "x", "quantize.x": 1}
    found = gguf_config.config(converted(hf) | more, {"output.weight"})
    assert found.eos_token_id == (1, 5)
    assert found.notes == ("keys not known and not used: deepseek2.new_feature",)


def test_all_missing_keys_are_named_at_once():
    with pytest.raises(BadConfig) as caught:
        gguf_config.config({"general.architecture": "deepseek2"}, set())
    missing = ["embedding_length", "block_count", "attention.kv_lora_rank", "rope.dimension_count", "vocab_size"]
    assert [key for key in missing if f"deepseek2.{key} is missing" not in str(caught.value)] == []


WRONG = {
    "architecture": ({"general.architecture": "llama"}, BadConfig, "found architecture llama\n.*known: deepseek2"),
    "no architecture": ({"general.architecture": None}, BadConfig, "names no general.architecture"),
    "sparse": ({"general.architecture": "deepseek4"}, Unsupported, "deepseek4.*not supported\n.*not MLA"),
    "architecture is a number": ({"general.architecture": 3}, BadConfig, "found architecture 3"),
    "indexer": ({"deepseek2.attention.indexer.top_k": 2048}, Unsupported, "indexer.top_k is 2048"),
    "temperature": ({"deepseek2.attention.temperature_scale": 0.1}, Unsupported, "temperature_scale is 0.1"),
    "attention factor": ({"deepseek2.rope.scaling.yarn_attn_factor": 2.0}, Unsupported, "yarn_attn_factor is 2.0"),
    "rope": ({"deepseek2.rope.scaling.type": "longrope"}, Unsupported, "longrope is not implemented"),
    "rank": (
        {"deepseek2.attention.kv_lora_rank": 31},
        BadConfig,
        "key_length is 40, expected 39\n.*value_length is 32, expected 31",
    ),
    "heads": ({"deepseek2.attention.head_count_kv": 4}, BadConfig, "head_count_kv is 4, expected 1"),
    "key": ({"deepseek2.attention.key_length_mla": 8}, BadConfig, "key_length is 8, expected more than .* 8"),
    "mtp": ({"deepseek2.nextn_predict_layers": 4}, BadConfig, "block_count is 4, of which nextn_predict_layers are 4"),
    "gate": ({"deepseek2.expert_gating_func": 4}, BadConfig, "expert_gating_func is 4, expected 1"),
    "text": ({"deepseek2.embedding_length": "48"}, BadConfig, "embedding_length is 48, expected an integer"),
    "truth": ({"deepseek2.embedding_length": True}, BadConfig, "embedding_length is True, expected an integer"),
    "number": ({"deepseek2.expert_weights_norm": 1}, BadConfig, "expert_weights_norm is 1, expected a boolean"),
    "tokens": ({"tokenizer.ggml.tokens": ["a"] * 97}, BadConfig, "vocab_size is 96, tokenizer.ggml.tokens has 97"),
    "experts": ({"deepseek2.expert_used_count": None}, BadConfig, "expert_used_count is missing"),
    "range": ({"deepseek2.embedding_length": 0}, BadConfig, "hidden_size is 0, expected 1 to"),
    "not a number": ({"deepseek2.rope.freq_base": float("nan")}, BadConfig, "rope_theta is nan"),
    "huge": ({"deepseek2.rope.scaling.yarn_log_multiplier": 1e300}, BadConfig, "mscale is .*expected 0 or more"),
    "length": ({"deepseek2.rope.scaling.original_context_length": None}, BadConfig, "original_context_length is missing"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_metadata_of_no_possible_model_is_refused(fault):
    changes, error, words = WRONG[fault]
    metadata = {k: v for k, v in (converted(full("v3")) | changes).items() if v is not None}
    with pytest.raises(error, match="(?s)" + words):
        gguf_config.config(metadata, {"output.weight"})


values = (
    st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=3) | st.just(np.array([])) | st.just([])
)
HF_V3 = full("v3")


@example(changes={"deepseek2.rope.scaling.yarn_log_multiplier": -3.4e37})
@given(changes=st.dictionaries(st.sampled_from([*converted(HF_V3)]), values, max_size=4))
@settings(max_examples=300)
def test_any_metadata_is_a_config_or_refused(changes):
    with contextlib.suppress(BadConfig, Unsupported):
        gguf_config.config({k: v for k, v in (converted(HF_V3) | changes).items() if v is not None}, {"output.weight"})


def test_a_kimi_file_from_before_betas_were_written_down_takes_those_of_the_release():
    hf = full("KIMI_K2")
    metadata = {key: value for key, value in converted(hf).items() if "yarn_beta" not in key}
    found = gguf_config.config(metadata, names_of(hf))
    assert (found.rope_scaling.beta_fast, found.rope_scaling.beta_slow) == (1, 1)
    other = gguf_config.config({**metadata, "deepseek2.block_count": 7}, names_of(hf))
    assert (other.rope_scaling.beta_fast, other.rope_scaling.beta_slow) == (32, 1)


# ---- names


def parameters(sources: dict, tensors: dict, config: Config) -> dict[str, np.ndarray]:
    out = {}
    for path, source in sources.items():
        pieces = [tensors[name] if index is None else tensors[name][index] for name, index, _ in source.pieces]
        parts = [np.asarray(source.part(piece, config)) for piece in pieces]
        out[path] = np.stack(parts) if source.stacked else parts[0]
    return out


@pytest.mark.parametrize("layout", ["new", "old", "both", "fused"])
@pytest.mark.parametrize("family", models.IN_GGUF)
def test_every_parameter_is_found_and_equals_the_released_one(family, layout):
    hf = models.FAMILIES[family]
    mtp = hf.get("num_nextn_predict_layers", 0) > 0
    config, released = Config.from_hf(hf), models.tensors(hf, mtp=mtp)
    state = nnx.state(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), mtp=mtp)))
    slots = {".".join(map(str, path)): variable.shape for path, variable in nnx.to_flat_state(state)}
    expected = parameters(HF.resolve(slots, config, released), released, config)
    present = gguf_tensors(hf, released, layout)
    sources = gguf_names.GGUF.resolve(slots, config, present)
    found = parameters(sources, present, config)
    for path, shape in slots.items():
        np.testing.assert_array_equal(found[path].reshape(shape), expected[path].reshape(shape), err_msg=path)


def test_the_shapes_of_the_table_are_those_of_llama_cpps_files():
    config = Config.preset("v3_2")
    shapes = {row.theirs: axes.shape(config, row.axes.split()) for row in gguf_names.GGUF.rules if row.ours.startswith("layers.")}
    assert shapes["blk.{l}.indexer.attn_q_b.weight"] == (64 * 128, 1536)
    assert shapes["blk.{l}.indexer.proj.weight"] == (64, 7168)
    assert shapes["blk.{l}.attn_k_b.weight"] == (128, 512, 128)
    assert shapes["blk.{l}.attn_v_b.weight"] == (128, 128, 512)
    assert shapes["blk.{l}.attn_kv_b.weight"] == (32768, 512)
    assert shapes["blk.{l}.ffn_down_exps.weight"] == (256, 7168, 2048)
