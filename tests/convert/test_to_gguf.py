"""mla-convert --to gguf: names, keys and shapes as llama.cpp's converter has them, numbers as the gguf package quantises them."""

import errno
import json
import os
import shutil
import signal
from collections import Counter

import gguf
import models
import numpy as np
import pytest
from checkpoints import convert, packed_gguf, parts, released
from weights import parameters
from weights.as_gguf import converted, full, gguf_tensors, keyed, write

from convert import export_gguf
from convert.__main__ import _name
from convert.gguf_metadata import architecture
from mla_jax import LLM
from mla_jax.base.config import Config
from mla_jax.base.errors import Unsupported
from mla_jax.base.families import PRESETS
from mla_jax.weights.hub import DEMO
from mla_jax.weights.load import Checkpoint, load

Block = gguf.GGMLQuantizationType
WIDE = {"hidden_size": 64, "intermediate_size": 96, "q_lora_rank": 32, "moe_intermediate_size": 32}  # rows of whole blocks
ROUNDING = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}


def folder(path, family: str = "v3", **changes):
    """A folder of float32 weights without text, and what llama.cpp's converter makes of its tensors and of its config."""
    hf = full(family) | changes
    weights = models.tensors(hf, mtp=True)
    expected = gguf_tensors(hf, weights, "new")
    for name in [name for name in expected if "nextn.embed_tokens" in name or "shared_head_head" in name]:
        del expected[name]  # which repeat the embedding and the head
    return models.write(path, hf, weights), expected, converted(hf)


def to_gguf(source, out, *options) -> gguf.GGUFReader:
    assert convert(source, out, "--to", "gguf", *options) == 0
    return gguf.GGUFReader(out)


def said(reader: gguf.GGUFReader) -> dict:
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def rounded(values: np.ndarray, kind: Block) -> np.ndarray:
    return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind).reshape(values.shape)


def assert_tensors(reader: gguf.GGUFReader, expected: dict, types: dict) -> None:
    """The values `expected`, each rounded to its type, which is F32 if `types` has no other."""
    assert {t.name for t in reader.tensors} == expected.keys()
    for tensor in reader.tensors:
        kind, values = types.get(tensor.name, Block.F32), expected[tensor.name]
        assert (tensor.name, tensor.tensor_type) == (tensor.name, kind)
        assert tuple(reversed(tensor.shape.tolist())) == values.shape
        found = gguf.quants.dequantize(tensor.data, kind).reshape(values.shape)
        np.testing.assert_array_equal(found, rounded(values, kind), err_msg=tensor.name)


def assert_metadata(found: dict, expected: dict) -> None:
    own = {key: value for key, value in found.items() if key.startswith("deepseek2.")}
    expected = {key: value for key, value in expected.items() if key.startswith("deepseek2.")}
    assert own == expected
    assert {key: type(value) for key, value in own.items()} == {key: type(value) for key, value in expected.items()}


# ---- what is written


@pytest.mark.parametrize("family", models.IN_GGUF)
def test_every_family_has_the_names_keys_and_values_of_llama_cpps_converter(tmp_path, family):
    source, tensors, metadata = folder(tmp_path / "hf", family)
    if family == "youtu":  # a file of dense layers alone says so, or llama.cpp looks for experts
        metadata["deepseek2.leading_dense_block_count"] = 3
        metadata.pop("deepseek2.expert_gating_func")
    reader = to_gguf(source, tmp_path / "m.gguf")
    assert_tensors(reader, tensors, {})
    assert_metadata(said(reader), metadata)


@pytest.mark.parametrize("family", models.IN_GGUF)
def test_the_file_is_the_same_model(tmp_path, family):
    source, _, _ = folder(tmp_path / "hf", family)
    to_gguf(source, tmp_path / "m.gguf")
    parameters.assert_equal(load(source, dtype="float32"), load(tmp_path / "m.gguf", dtype="float32"))
    one, two = (Checkpoint(path).config for path in (source, tmp_path / "m.gguf"))
    assert two.notes == ()
    assert one.max_position_embeddings == two.max_position_embeddings


@pytest.mark.parametrize("dtype", ROUNDING)
def test_matrices_are_rounded_as_the_gguf_package_rounds_them(tmp_path, dtype):
    source, tensors, _ = folder(tmp_path / "hf", **WIDE)
    reader, kind = to_gguf(source, tmp_path / "m.gguf", "--dtype", dtype), Block[ROUNDING[dtype]]
    small = {name for name, values in tensors.items() if values.ndim == 1 or "ffn_gate_inp" in name}
    types = {name: kind for name in tensors if name not in small}
    if dtype in ("q8_0", "q4_0"):  # rows of 16, no whole block of 32
        types |= {name: Block.F16 for name in tensors if "attn_k_b" in name}
    if dtype == "q4_0":
        types |= dict.fromkeys(("token_embd.weight", "output.weight"), Block.Q8_0)
    assert_tensors(reader, tensors, types)
    found = said(reader)
    assert found["general.file_type"] == {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}[dtype]
    assert ("general.quantized_by" in found) == (dtype in ("q8_0", "q4_0"))
    assert found["general.quantization_version"] == 2


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0"])
def test_packed_sources_are_unpacked_first(tmp_path, dtype):
    source = parts(tmp_path / "own")  # DeepSeek's parts in FP8, with a tokenizer that GGUF cannot name
    (source / "tokenizer.json").unlink()
    reader, kind = to_gguf(source, tmp_path / "m.gguf", "--dtype", dtype), Block[ROUNDING[dtype]]
    found, plain = load(tmp_path / "m.gguf", dtype="float32"), parameters.of(load(source, dtype="float32"))
    for path, values in parameters.of(found).items():
        expected = plain[path]
        if path.endswith("attn.uk"):  # whose rows in the file go along the other axis
            expected = rounded(expected.swapaxes(1, 2), kind).swapaxes(1, 2) if expected.shape[1] % 32 == 0 else None
        elif expected.ndim > 1 and not path.endswith("router.weight"):
            expected = rounded(expected, kind)
        if expected is not None:
            np.testing.assert_array_equal(values, expected, err_msg=path)
    assert kind in {tensor.tensor_type for tensor in reader.tensors}


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "bf16"])
def test_blocks_of_both_halves_are_cut_by_their_values(tmp_path, dtype):
    source = packed_gguf(tmp_path / "source.gguf", "old")
    reader, kind = to_gguf(source, tmp_path / "m.gguf", "--dtype", dtype), Block[ROUNDING[dtype]]
    heads, nope, rank = 4, 16, 32
    before = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(source).tensors}
    after = {t.name: t for t in reader.tensors}
    for layer in range(4):
        both = before[f"blk.{layer}.attn_kv_b.weight"].reshape(heads, -1, rank)
        key, value = after[f"blk.{layer}.attn_k_b.weight"], after[f"blk.{layer}.attn_v_b.weight"]
        assert value.tensor_type == kind
        expected = rounded(both[:, :nope].transpose(0, 2, 1), key.tensor_type), rounded(both[:, nope:], kind)
        for tensor, values in zip((key, value), expected, strict=True):
            found = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
            np.testing.assert_array_equal(found, values, err_msg=tensor.name)


def test_a_single_expert_is_a_stack_of_one(tmp_path):
    one = {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    source, tensors, _ = folder(tmp_path / "hf", **one)
    assert_tensors(to_gguf(source, tmp_path / "m.gguf"), tensors, {})


@pytest.mark.parametrize("layout", ["new", "old", "both", "fused"])
def test_blocks_of_a_gguf_file_stay_as_they_are_also_by_way_of_orbax(tmp_path, layout):
    source = packed_gguf(tmp_path / "source.gguf", layout)
    assert convert(source, tmp_path / "orbax") == 0
    for i, between in enumerate((source, tmp_path / "orbax")):
        options = () if between is source else ("--dtype", "keep")
        if between is not source:
            (between / "tokenizer.json").unlink()
        reader = to_gguf(between, tmp_path / f"{i}.gguf", *options)
        before = {t.name: t for t in gguf.GGUFReader(source).tensors}
        for tensor in reader.tensors:
            if tensor.name in before and "ffn_gate_inp" not in tensor.name:
                assert tensor.tensor_type == before[tensor.name].tensor_type, tensor.name
                np.testing.assert_array_equal(tensor.data, before[tensor.name].data, err_msg=tensor.name)
        parameters.assert_equal(load(source, dtype="float32"), load(tmp_path / f"{i}.gguf", dtype="float32"))


def test_what_a_gguf_file_says_of_itself_and_its_text_stays(tmp_path):
    kind, hf = gguf.GGUFValueType, full("v3")
    own = {f"general.{key}": (value, kind.STRING) for key, value in {"name": "Tiny", "author": "A", "quantized_by": "B"}.items()}
    own |= {"general.file_type": (7, kind.UINT32), "general.tags": (["a", "b"], kind.ARRAY)}
    text = {"model": ("gpt2", kind.STRING), "pre": ("gpt-2", kind.STRING), "tokens": ([*"abcd", "ab"], kind.ARRAY)}
    text |= {"token_type": ([1, 1, 1, 3, 1], kind.ARRAY, kind.INT32), "merges": (["a b"], kind.ARRAY)}
    text = {f"tokenizer.ggml.{key}": value for key, value in text.items()}
    write(tmp_path / "named.gguf", keyed(hf) | own | text, gguf_tensors(hf, models.tensors(hf, mtp=True), "new"))
    before = said(gguf.GGUFReader(tmp_path / "named.gguf"))
    kept = said(to_gguf(tmp_path / "named.gguf", tmp_path / "kept.gguf"))
    assert {key: kept[key] for key in before} == before
    reader = to_gguf(tmp_path / "named.gguf", tmp_path / "m.gguf", "--dtype", "bf16")
    after = said(reader)
    assert {key: after[key] for key in before} == before | {"general.file_type": 32}
    rounded = said(to_gguf(tmp_path / "named.gguf", tmp_path / "rounded.gguf", "--dtype", "q8_0"))
    assert rounded["general.quantized_by"].startswith("mla-convert ")
    assert reader.fields["tokenizer.ggml.token_type"].types == [kind.ARRAY, kind.INT32]


# ---- text


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    file = tmp_path_factory.mktemp("demo") / "demo.gguf"
    to_gguf(DEMO, file, "--dtype", "q8_0")
    return file


def test_the_demo_says_the_same_in_the_same_tokens(demo):
    ours, theirs = LLM(demo), LLM()
    for text in ("def f(x):\n    return x ** 2\n", "naïve 日本語 12345\n\n\n  x", "<\uff5cUser\uff5c>no control"):
        assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)
        assert ours.tokenizer.decode(ours.tokenizer.encode(text)) == theirs.tokenizer.decode(theirs.tokenizer.encode(text))
    messages = [{"role": "user", "content": "sort a list"}]
    assert ours.chat_template.encode(messages, ours.tokenizer) == theirs.chat_template.encode(messages, theirs.tokenizer)
    assert ours.config.eos_token_id == theirs.config.eos_token_id
    given = json.loads((DEMO / "generation_config.json").read_text())
    metadata = said(gguf.GGUFReader(demo))
    assert metadata["general.sampling.temp"] == pytest.approx(given["temperature"])
    assert metadata["general.sampling.top_p"] == pytest.approx(given["top_p"])


def test_the_demos_vocabulary_is_that_of_its_files(demo):
    found = said(gguf.GGUFReader(demo))
    content = json.loads((DEMO / "tokenizer.json").read_text())
    tokens = {text: number for number, text in enumerate(found["tokenizer.ggml.tokens"])}
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    assert tokens == content["model"]["vocab"] | added
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    assert found["tokenizer.ggml.merges"] == merges
    types = found["tokenizer.ggml.token_type"]
    assert {number for number, kind in enumerate(types) if kind == gguf.TokenType.CONTROL} == {*added.values()}
    assert Counter(types)[gguf.TokenType.NORMAL] == len(types) - len(added)
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    assert found["tokenizer.chat_template"] == settings["chat_template"]
    assert found["tokenizer.ggml.bos_token_id"] == tokens[settings["bos_token"]]
    assert found["tokenizer.ggml.eos_token_id"] == tokens[settings["eos_token"]]
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["general.name"] == "demo"
    assert found["general.type"] == "model"
    assert found["general.size_label"] == "4x10M"


def test_a_folder_without_a_tokenizer_becomes_a_file_without_one(tmp_path):
    source, _, _ = folder(tmp_path / "hf")
    assert said(to_gguf(source, tmp_path / "m.gguf"))["tokenizer.ggml.model"] == "no_vocab"


def test_a_tokenizer_that_no_name_stands_for_is_refused(tmp_path, capfd):
    assert convert(released(tmp_path / "hf"), tmp_path / "m.gguf", "--to", "gguf") == 3
    assert "error: the tokenizer cannot be written to a GGUF file\n" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# ---- what is refused

REFUSED_OPTIONS = {
    "a GGUF file is not written in int8": ("m.gguf", "--to", "gguf", "--dtype", "int8"),
    "a GGUF file is not cut for a mesh": ("m.gguf", "--to", "gguf", "--mesh", "data=2"),
    "out is no name of a GGUF file": ("out", "--to", "gguf"),
    "an Orbax folder is not written in q8_0": ("out", "--dtype", "q8_0"),
    "a Hugging Face folder is not written in f16": ("out", "--to", "hf", "--dtype", "f16"),
}


@pytest.mark.parametrize("finding", REFUSED_OPTIONS)
def test_options_that_do_not_go_together_are_refused(tmp_path, capfd, monkeypatch, finding):
    monkeypatch.chdir(tmp_path)
    assert convert("no/such/model", *REFUSED_OPTIONS[finding]) == 2
    assert capfd.readouterr().err.startswith(f"error: {finding}\n")


def test_the_package_that_writes_is_asked_for(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("convert.__main__.find_spec", lambda name: None)
    assert convert("x", tmp_path / "m.gguf", "--to", "gguf") == 3
    assert 'pip install ".[gguf]"' in capfd.readouterr().err


REFUSED_MODELS = {
    "rope_interleave is False; read back it would be True": {"rope_interleave": False},
    "rope_scaling.mscale is 0.5; read back it would be 1.0": {"rope_scaling": {**models.yarn(40, 1.0, 1.0), "mscale": 0.5}},
    "rope_scaling.truncate is False; read back": {"rope_scaling": {**models.yarn(40, 1.0, 1.0), "truncate": False}},
    "layers with experts is [True, False, True]": {"first_k_dense_replace": 0, "moe_layer_freq": 2},
    "topk_method is greedy; read back it would be noaux_tc": {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
}


@pytest.mark.parametrize("finding", REFUSED_MODELS)
def test_what_the_keys_cannot_say_is_refused(finding):
    config = Config.from_hf(full("v3") | REFUSED_MODELS[finding])
    with pytest.raises(Unsupported, match="cannot describe this model") as caught:
        architecture(config, mtp=True, tied=False)
    assert finding in str(caught.value)


@pytest.mark.parametrize("family", sorted(models.FAMILIES.keys() - {*models.IN_GGUF}))
def test_families_that_the_keys_cannot_say_are_refused(family):
    config = Config.from_hf(models.FAMILIES[family])
    with pytest.raises(Unsupported, match=r"cannot describe this model|longrope is not implemented"):
        architecture(config, mtp=False, tied=config.tie_word_embeddings)


def test_a_model_that_the_keys_cannot_say_is_not_begun(tmp_path, capfd):
    source, _, _ = folder(tmp_path / "hf", rope_interleave=False)
    assert convert(source, tmp_path / "m.gguf", "--to", "gguf") == 3
    assert "rope_interleave" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_formats_that_gguf_lacks_are_refused_and_the_choices_named(tmp_path, capfd):
    assert convert(DEMO, tmp_path / "m.gguf", "--to", "gguf") == 3
    assert "a GGUF file cannot hold fp8_block\n  as " in (found := capfd.readouterr().err)
    assert "f32, f16, bf16, q8_0, q4_0" in found
    assert [*tmp_path.iterdir()] == []


def test_values_beyond_the_type_and_values_that_are_not_finite_are_refused(tmp_path, capfd):
    source, _, _ = folder(tmp_path / "hf")
    weights = models.tensors(full("v3"), mtp=True)
    for value, finding in ((1e6, "too large for F16"), (np.nan, "weights hold NaN or infinity")):
        weights["model.layers.0.mlp.up_proj.weight"][3, 4] = value
        models.write(source, full("v3"), weights)
        assert convert(source, tmp_path / "m.gguf", "--to", "gguf", "--dtype", "f16") == 3
        assert finding in capfd.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert convert(source, tmp_path / "m.gguf", "--to", "gguf", "--dtype", "f16", "--allow-nonfinite") == 0
    found = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert np.isnan(found["blk.0.ffn_up.weight"][3, 4])


NOTES = {
    "v3": (),
    "v2": ("llama.cpp rates groups of experts by their best two",),
    "kimi_k2": ("run it with --yarn-beta-fast 1 --yarn-beta-slow 1",),
    "moonlight": ("this one has 3 layers and no q_lora_rank",),
}


@pytest.mark.parametrize("family", NOTES)
def test_a_dry_run_says_what_is_written_and_where_llama_cpp_differs(tmp_path, capfd, family):
    source, _, _ = folder(tmp_path / "hf", family)
    assert convert(source, tmp_path / "m.gguf", "--to", "gguf", "--dtype", "q8_0", "--dry-run") == 0
    found = capfd.readouterr().err
    for word in ("reads  ", "writes  ", "memory  ", "disk  ", "note      weights are rounded", *NOTES[family]):
        assert word in found
    assert found.count("llama.cpp") == len(NOTES[family])
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("name", [name for name in PRESETS if name in ("tiny", *models.IN_GGUF)])
def test_released_configs_can_be_said(name):
    config = Config.preset(name)
    keys = architecture(config, True, config.tie_word_embeddings)
    blocks = config.num_hidden_layers + config.num_nextn_predict_layers
    assert keys["deepseek2.block_count"] == blocks


@pytest.mark.parametrize("name", ["v3_2", "glm_5_2"])
def test_models_with_indexers_are_refused(name):
    with pytest.raises(Unsupported, match=r"(?s)deepseek2 cannot describe this model.*index_topk is 2048"):
        architecture(Config.preset(name), True, False)


# ---- all or nothing


@pytest.fixture
def source(tmp_path):
    return folder(tmp_path / "hf")[0]


def at_tensor(monkeypatch, number: int, act):
    write, calls = gguf.GGUFWriter.write_tensor_data, []

    def acting(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            act()
        return write(*arguments)

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", acting)


def full_disk():
    raise OSError(errno.ENOSPC, "No space left on device")


STOPS = {
    "Ctrl-C": (lambda: signal.raise_signal(signal.SIGINT), 130, "stopped: nothing is left"),
    "a full disk": (full_disk, 4, "the disk is full, or a quota is reached"),
}


@pytest.mark.parametrize("stop", STOPS)
def test_nothing_is_left_of_a_conversion_that_stops(tmp_path, source, monkeypatch, capfd, stop):
    act, code, finding = STOPS[stop]
    with monkeypatch.context() as patch:
        at_tensor(patch, 7, act)
        assert convert(source, tmp_path / "m.gguf", "--to", "gguf") == code
    found = capfd.readouterr().err
    assert finding in found
    assert "resume" not in found
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    to_gguf(source, tmp_path / "m.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m.gguf"]


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path, source, monkeypatch, capfd):
    at_tensor(monkeypatch, 3, lambda: os.utime(source / "model.safetensors", ns=(1, 1)))
    assert convert(source, tmp_path / "m.gguf", "--to", "gguf") == 3
    assert "while it was read" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_room_on_the_disk_and_in_memory_is_looked_for_first(tmp_path, source, monkeypatch, capfd):
    for name, finding in (("free", "does not fit on its disk"), ("available", "more memory than there is")):
        with monkeypatch.context() as patch:
            patch.setattr(export_gguf, name, lambda *_: 1000)
            assert convert(source, tmp_path / "m.gguf", "--to", "gguf") == 4
        assert finding in capfd.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_files_of_others_stay_and_what_a_kill_left_is_written_over(tmp_path, source, capfd):
    out, partial = tmp_path / "m.gguf", tmp_path / "m.gguf.partial"
    partial.write_text("years of work")
    assert convert(source, out, "--to", "gguf") == 3
    assert f"error: {partial} was not made by a conversion" in capfd.readouterr().err
    assert partial.read_text() == "years of work"
    partial.write_bytes(b"GGUF and half of the rest")
    to_gguf(source, out)
    assert not partial.exists()
    before = out.read_bytes()
    assert convert(source, out, "--to", "gguf") == 3
    assert f"error: {out} exists already" in capfd.readouterr().err
    assert out.read_bytes() == before


def test_the_name_is_that_of_the_folder_with_its_dots(tmp_path, source):
    shutil.move(source, tmp_path / "Model-V2.5")
    assert said(to_gguf(tmp_path / "Model-V2.5", tmp_path / "m.gguf"))["general.name"] == "Model-V2.5"


def test_a_model_of_the_hub_has_its_name_there(tmp_path):
    assert _name("org/Model-V2.5@main", tmp_path / "snapshots" / "0123abc") == "Model-V2.5"
    (tmp_path / "small.gguf").touch()
    assert _name(str(tmp_path / "small.gguf"), tmp_path / "small.gguf") == "small"
