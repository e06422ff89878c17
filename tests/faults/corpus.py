"""Every bad model folder: a valid one, changed by a named mutation, with the error it must raise and words that must be in it.

A mutation is a function of the folder. The same table can seed a fuzzer."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import models
import numpy as np
from safetensors.numpy import save_file
from weights import fp8

from mla_jax.base.errors import BadConfig, BadFile, MlaJaxError, Unsupported

BLOCK = (16, 24)
HF = {**models.FAMILIES["v3"], "num_nextn_predict_layers": 0}
QUANTIZED = {**HF, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}}
EMBED, NORM, O_PROJ = "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.o_proj.weight"
SCALE = O_PROJ + fp8.SCALE
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_valid(root: Path) -> None:
    """The folders that mutations start from: one file, two files with an index, FP8."""
    weights = {name: w.astype(ml_dtypes.bfloat16) for name, w in models.tensors(HF).items()}
    models.write(root / "single", HF, weights)
    models.write(root / "sharded", HF, weights, shards=2)
    models.write(root / "fp8", QUANTIZED, fp8.quantized(models.tensors(HF), BLOCK))


class Fault(NamedTuple):
    name: str
    mutate: Callable[[Path], object]
    error: type[MlaJaxError]
    words: tuple[str, ...]
    base: str = "single"
    reads: bool = False  # whether it can be seen only in the weights themselves


# ---- ways to change a folder


def raw(edit: Callable[[bytes], bytes], file: str = FILE):
    """Changes the bytes of a file."""

    def mutate(folder: Path):
        (folder / file).write_bytes(edit((folder / file).read_bytes()))

    return mutate


def split(data: bytes) -> tuple[dict, bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def load_file(path: Path) -> dict[str, np.ndarray]:
    """As in safetensors.numpy, which cannot read FP8."""
    entries, data = split(path.read_bytes())
    entries.pop("__metadata__", None)
    kinds = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    return {
        name: np.frombuffer(data[slice(*e["data_offsets"])], kinds[e["dtype"]]).reshape(e["shape"]) for name, e in entries.items()
    }


def joined(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def header(edit: Callable[[dict], object]):
    """Changes the parsed header, leaving the data as it is."""

    def change(data: bytes) -> bytes:
        entries, rest = split(data)
        edit(entries)
        return joined(json.dumps(entries).encode(), rest)

    return raw(change)


def entry(name: str = NORM, **changes):
    return header(lambda entries: entries[name].update(changes))


def header_bytes(content: bytes):
    return raw(lambda data: joined(content, split(data)[1]))


def tensors(edit: Callable[[dict], object], file: str = FILE):
    """Changes the tensors, written back as a sound file."""

    def mutate(folder: Path):
        found = load_file(folder / file)
        edit(found)
        save_file(found, folder / file)

    return mutate


def element(name: str, value: float):
    def edit(found: dict):
        found[name] = found[name].copy()
        found[name].reshape(-1)[3] = value

    return tensors(edit)


def add(name: str, shape: tuple[int, ...] = (2,), dtype: type = np.float32):
    return tensors(lambda found: found.update({name: np.ones(shape, dtype)}))


def remove(*names: str):
    return tensors(lambda found: [found.pop(name) for name in names])


def index(edit: Callable[[dict], object]):
    """Changes the weight_map of the index."""

    def mutate(folder: Path):
        content = json.loads((folder / INDEX).read_text())
        edit(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return mutate


def config(**changes):
    """Changes keys of config.json; `...` removes one."""

    def mutate(folder: Path):
        content = {**json.loads((folder / "config.json").read_text()), **changes}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))

    return mutate


def config_text(edit: Callable[[str], str]):
    return raw(lambda data: edit(data.decode()).encode(), "config.json")


def sparse(file: str, size: int, start: bytes = b""):
    """A file of `size` bytes that takes no room."""

    def mutate(folder: Path):
        (folder / file).write_bytes(start)
        os.truncate(folder / file, size)

    return mutate


def rename(old: str, new: str):
    return lambda folder: (folder / old).rename(folder / new)


def pipe_instead_of(file: str):
    """Whoever opens it without looking waits for ever."""

    def mutate(folder: Path):
        (folder / file).unlink()
        os.mkfifo(folder / file)

    return mutate


def both(*mutations):
    return lambda folder: [mutate(folder) for mutate in mutations]


def duplicate_key(data: bytes) -> bytes:
    entries, rest = split(data)
    text = json.dumps(entries)
    return joined(f'{text[:-1]}, "{NORM}": {json.dumps(entries[NORM])}}}'.encode(), rest)


def hole(entries: dict) -> None:
    """Moves everything behind the first tensor up by 8 bytes."""
    for name, found in entries.items():
        if name != "__metadata__" and found["data_offsets"][0] > 0:
            found["data_offsets"] = [n + 8 for n in found["data_offsets"]]


def overlap(entries: dict) -> None:
    last = max((e for name, e in entries.items() if name != "__metadata__"), key=lambda e: e["data_offsets"][1])
    last["data_offsets"] = [n - 8 for n in last["data_offsets"]]


def linked_out(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (folder / FIRST).rename(outside / FIRST)
    (folder / FIRST).symlink_to(outside / FIRST)


def link_loop(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / FIRST).symlink_to(FIRST)


def other_folder_of_pipes(folder: Path) -> str:
    """A place outside that hangs whoever opens it."""
    outside = folder.parent / "outside"
    outside.mkdir()
    os.mkfifo(outside / "x.safetensors")
    return str(outside / "x.safetensors")


def mapped_to_absolute_path(folder: Path) -> None:
    path = other_folder_of_pipes(folder)
    index(lambda weight_map: weight_map.update({NORM: path}))(folder)


def mapped_to_parent_path(folder: Path) -> None:
    other_folder_of_pipes(folder)
    index(lambda weight_map: weight_map.update({NORM: "../outside/x.safetensors"}))(folder)


def mapped_to(file: object):
    return index(lambda weight_map: weight_map.update({NORM: file}))


def shard_of_other_name(folder: Path) -> None:
    """One shard is missing, one is not known, and a tensor is in both known ones."""
    save_file(load_file(folder / SECOND), folder / "stray.safetensors")
    (folder / FIRST).unlink()
    save_file(load_file(folder / SECOND), folder / "model-00003-of-00002.safetensors")
    index(lambda weight_map: weight_map.update({NORM: "model-00003-of-00002.safetensors"}))(folder)


def index_of_other_tensors(weight_map: dict) -> None:
    """One tensor too many, one too few, one in the wrong shard."""
    weight_map["model.layers.0.extra"] = FIRST
    del weight_map[O_PROJ]
    weight_map[EMBED] = {FIRST: SECOND, SECOND: FIRST}[weight_map[EMBED]]


def pickles(suffix: str):
    return both(rename(FILE, f"pytorch_model{suffix}"))


_FLOAT = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
_NESTED = b"[" * 100_000 + b"]" * 100_000
_HUGE = "9" * 4000
_TOO_MANY = json.dumps({f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(100_001)}).encode()

SAFETENSORS = (
    # row 1: shorter than the header says
    Fault(
        "data_cut_in_half",
        raw(lambda d: d[: len(d) // 2]),
        BadFile,
        (FILE, "cut short", "header promises", "fetch that file again"),
    ),
    Fault("last_byte_missing", raw(lambda d: d[:-1]), BadFile, (FILE, "cut short")),
    Fault("header_cut", raw(lambda d: d[:1000]), BadFile, (FILE, "cut short", "the file has 1,000")),
    Fault("empty_file", raw(lambda d: b""), BadFile, (FILE, "cut short", "the file has 0")),
    Fault("seven_bytes", raw(lambda d: d[:7]), BadFile, (FILE, "cut short", "at least 8 bytes", "the file has 7")),
    Fault("length_only", raw(lambda d: d[:8]), BadFile, (FILE, "cut short", "the file has 8")),
    Fault("second_shard_cut", raw(lambda d: d[:-100], SECOND), BadFile, (SECOND, "cut short"), "sharded"),
    # row 2: headers that are none
    Fault("header_longer_than_file", raw(lambda d: struct.pack("<Q", 10**9) + d[8:]), BadFile, ("cut short", "1,000,000,000")),
    Fault("header_of_2_to_64", raw(lambda d: b"\xff" * 8 + d[8:]), BadFile, ("cut short", "18,446,744,073,709,551,615")),
    Fault(
        "header_over_100_mb", sparse(FILE, 1 << 30, struct.pack("<Q", 105_000_000)), BadFile, ("impossible header", "105,000,000")
    ),
    Fault(
        "header_of_zeros", sparse(FILE, 1 << 30, struct.pack("<Q", 100_000_000)), BadFile, ("refused by the safetensors library",)
    ),
    Fault("header_not_utf8", header_bytes(b'{"\xff\xfe": 1}'), BadFile, (f"the header of {FILE}", "not valid JSON", "utf-8")),
    Fault("header_not_json", header_bytes(b'{"a": '), BadFile, (f"the header of {FILE}", "not valid JSON")),
    Fault("header_of_no_bytes", header_bytes(b""), BadFile, (f"the header of {FILE}", "not valid JSON")),
    Fault("header_is_a_list", header_bytes(b"[1, 2]"), BadFile, ("not a JSON object", "list")),
    Fault("header_nested_100_000_deep", header_bytes(_NESTED), BadFile, ("nested too deeply",)),
    Fault("entry_nested_100_000_deep", header_bytes(b'{"a": ' + _NESTED + b"}"), BadFile, ("nested too deeply",)),
    Fault(
        "shape_nested_900_deep",
        header_bytes(b'{"a": {"dtype": "F32", "data_offsets": [0, 4], "shape": ' + b"[" * 900 + b"]" * 900 + b"}}"),
        BadFile,
        ("a ",),
    ),
    # row 3: tensors that do not tile the data
    Fault(
        "hole_between_tensors",
        both(header(hole), raw(lambda d: d + b"\0" * 8)),
        BadFile,
        ("leaves a hole before it", "it starts at byte"),
    ),
    Fault("tensors_overlap", header(overlap), BadFile, ("overlaps the tensor before it", "expected")),
    Fault("trailing_bytes", raw(lambda d: d + b"\0" * 5), BadFile, (FILE, "trailing bytes")),
    Fault("shape_larger_than_bytes", entry(shape=[49]), BadFile, (NORM, "wrong number of bytes", "takes 98", "span 96")),
    Fault("shape_smaller_than_bytes", entry(shape=[47]), BadFile, (NORM, "wrong number of bytes")),
    Fault("dtype_wider_than_bytes", entry(dtype="F32"), BadFile, (NORM, "wrong number of bytes", "F32")),
    Fault("negative_shape", entry(shape=[-48]), BadFile, (NORM, "impossible shape", "-48")),
    Fault("two_negative_shapes", entry(shape=[-6, -8]), BadFile, (NORM, "impossible shape")),
    Fault("shape_product_wraps_to_0", entry(shape=[1 << 62, 4]), BadFile, (NORM, "wrong number of bytes")),
    Fault("shape_beyond_64_bits", entry(shape=[1 << 64]), BadFile, (NORM, "impossible shape")),
    Fault("shape_of_floats", entry(shape=[48.0]), BadFile, (NORM, "impossible shape")),
    Fault("shape_of_truths", entry(shape=[True]), BadFile, (NORM, "impossible shape")),
    Fault("shape_is_a_text", entry(shape="48"), BadFile, (NORM, "impossible shape")),
    Fault("shape_of_nine_dimensions", entry(shape=[48] + [1] * 8), BadFile, (NORM, "impossible shape")),
    Fault("offsets_backwards", header(lambda e: e[NORM]["data_offsets"].reverse()), BadFile, (NORM, "wrong number of bytes")),
    Fault("offsets_beyond_the_file", entry(data_offsets=[1 << 40, (1 << 40) + 96]), BadFile, (NORM, "leaves a hole before it")),
    Fault("negative_offsets", entry(data_offsets=[-96, 0]), BadFile, (NORM, "impossible shape or offset")),
    Fault("three_offsets", entry(data_offsets=[0, 48, 96]), BadFile, (NORM, "impossible shape or offset")),
    Fault("no_dtype", header(lambda e: e[NORM].pop("dtype")), BadFile, (NORM, "no dtype, shape and data_offsets")),
    Fault("entry_is_a_number", header(lambda e: e.update({NORM: 7})), BadFile, (NORM, "no dtype, shape and data_offsets")),
    Fault("unknown_dtype", entry(dtype="F7_E3M3"), Unsupported, (NORM, "F7_E3M3", "known: ")),
    Fault("dtype_is_a_list", entry(dtype=["BF16"]), Unsupported, (NORM, "known: ")),
    Fault(
        "metadata_of_numbers", header(lambda e: e.update(__metadata__={"a": 1})), BadFile, ("refused by the safetensors library",)
    ),
    # row 4: one name twice
    Fault("name_twice_in_a_header", raw(duplicate_key), BadFile, (f"the header of {FILE}", "key given twice", NORM)),
    Fault(
        "name_in_two_files",
        lambda folder: save_file({NORM: np.ones(48, np.float32)}, folder / "more.safetensors"),
        BadFile,
        (NORM, "is in two files", FILE, "more.safetensors"),
    ),
    Fault(
        "name_in_two_shards",
        both(*(tensors(lambda f: f.update(twice=np.ones(2)), s) for s in (FIRST, SECOND)), mapped_to(FIRST)),
        BadFile,
        ("twice is in", FIRST, SECOND),
        "sharded",
    ),
    # row 5: an index that leads elsewhere
    Fault("mapped_to_absolute_path", mapped_to_absolute_path, BadFile, ("x.safetensors is not a name of a file",), "sharded"),
    Fault(
        "mapped_to_parent_path", mapped_to_parent_path, BadFile, ("../outside", "not a name of a file in the folder"), "sharded"
    ),
    Fault("mapped_with_backslash", mapped_to("..\\x.safetensors"), BadFile, ("not a name of a file in the folder",), "sharded"),
    Fault("mapped_with_nul", mapped_to("x\0.safetensors"), BadFile, ("x\\x00.safetensors", "not a name of a file"), "sharded"),
    Fault("mapped_with_escape_codes", mapped_to("\x1b[2J.safetensors"), BadFile, ("\\x1b[2J", "not a name of a file"), "sharded"),
    Fault("mapped_with_half_a_character", mapped_to("\ud800.safetensors"), BadFile, ("not a name of a file",), "sharded"),
    Fault("mapped_to_no_safetensors", mapped_to("config.json"), BadFile, ("config.json", "ends in .safetensors"), "sharded"),
    Fault("mapped_to_nothing", mapped_to(""), BadFile, ("'' is not a name of a file in the folder",), "sharded"),
    Fault("mapped_to_dots", mapped_to(".."), BadFile, ("not a name of a file in the folder",), "sharded"),
    Fault("mapped_to_a_long_name", mapped_to("é" * 200 + ".safetensors"), BadFile, ("not a name of a file",), "sharded"),
    Fault("shard_links_out_of_the_folder", linked_out, BadFile, (FIRST, "leaves the model folder", "outside"), "sharded"),
    Fault("shard_links_to_itself", link_loop, BadFile, (FIRST,), "sharded"),
    Fault(
        "file_links_out_of_the_folder",
        both(rename(FILE, FIRST), linked_out, rename(FIRST, FILE)),
        BadFile,
        ("leaves the model folder",),
    ),
    Fault("shard_is_a_pipe", pipe_instead_of(FIRST), BadFile, (FIRST, "not a regular file"), "sharded"),
    Fault(
        "shard_is_a_folder",
        both(lambda f: (f / FIRST).unlink(), lambda f: (f / FIRST).mkdir()),
        BadFile,
        ("not a regular file",),
        "sharded",
    ),
    # row 6: the index and the files disagree
    Fault(
        "shard_missing",
        lambda folder: (folder / SECOND).unlink(),
        BadFile,
        ("index", "disagree", f"{SECOND} is missing"),
        "sharded",
    ),
    Fault(
        "shard_missing_and_another_not_known",
        shard_of_other_name,
        BadFile,
        (f"{FIRST} is missing", "stray.safetensors is not in the index", f"is in {SECOND} and in model-00003"),
        "sharded",
    ),
    Fault(
        "index_of_other_tensors",
        index(index_of_other_tensors),
        BadFile,
        (f"model.layers.0.extra is not in {FIRST}", f"{EMBED} is not in", f"{O_PROJ} is in", "but not in the index"),
        "sharded",
    ),
    Fault(
        "no_index_and_a_part_missing",
        both(lambda f: (f / INDEX).unlink(), lambda f: (f / FIRST).unlink()),
        BadFile,
        ("lacks 1 of its weight files", FIRST),
        "sharded",
    ),
    Fault("index_without_weight_map", raw(lambda d: b"{}", INDEX), BadFile, (INDEX, "no weight_map"), "sharded"),
    Fault("index_is_a_list", raw(lambda d: b"[]", INDEX), BadFile, (INDEX, "not a JSON object"), "sharded"),
    Fault("index_cut", raw(lambda d: d[:100], INDEX), BadFile, (INDEX, "not valid JSON"), "sharded"),
    Fault("index_of_1_gb", sparse(INDEX, 1 << 30), BadFile, (INDEX, "too large"), "sharded"),
    Fault("index_maps_to_numbers", mapped_to(7), BadFile, (INDEX, "no weight_map"), "sharded"),
    # row 7: missing, not used
    Fault("tensor_missing", remove(NORM), BadFile, ("do not fit the model", f"missing: {NORM}")),
    Fault("tensor_not_used", add("model.layers.0.self_attn.sinks"), BadFile, ("not used: model.layers.0.self_attn.sinks",)),
    Fault(
        "tensor_misspelt",
        both(add("model.layers.0.self_attn.o_prj.weight", (48, 64)), remove(O_PROJ)),
        BadFile,
        (f"missing: {O_PROJ} (not used, and near: model.layers.0.self_attn.o_prj.weight)",),
    ),
    Fault(
        "nine_tensors_missing",
        remove(*(f"model.layers.1.mlp.experts.{x}.{p}_proj.weight" for x in range(3) for p in ("gate", "up", "down"))),
        BadFile,
        ("missing: model.layers.1.mlp.experts.0.gate_proj.weight", "missing: 1 more"),
    ),
    Fault("rotary_table_of_another_name", add("model.layers.0.mlp.rotary_emb.inv_freq"), BadFile, ("not used: ", "rotary_emb")),
    Fault("mtp_copy_in_a_main_layer", add("model.layers.0.shared_head.head.weight"), BadFile, ("not used: ", "shared_head")),
    Fault("mtp_layer_not_announced", add("model.layers.3.enorm.weight"), BadFile, ("not used: model.layers.3.enorm.weight",)),
    Fault(
        "head_of_a_model_that_ties_it",
        both(config(tie_word_embeddings=False), remove("lm_head.weight")),
        BadFile,
        ("missing: lm_head",),
    ),
    Fault(
        "more_layers_announced", config(num_hidden_layers=1000), BadFile, ("num_hidden_layers is 1000", "model.layers.* has 3")
    ),
    Fault("more_experts_announced", config(n_routed_experts=16384), BadFile, ("n_routed_experts is 16384", "experts.* has 8")),
    Fault(
        "tensors_of_another_naming",
        tensors(lambda f: [f.update({"text." + name: f.pop(name)}) for name in list(f)]),
        BadFile,
        ("num_hidden_layers is 3", "model.layers.* has 0", "such as text."),
    ),
    # row 8: another shape or dtype than its place has
    Fault("embedding_of_another_vocabulary", config(vocab_size=97), BadFile, (EMBED, "[96, 48]", "[97, 48]", "vocab_size 97")),
    Fault(
        "matrix_transposed",
        tensors(lambda f: f.update({O_PROJ: np.ascontiguousarray(f[O_PROJ].T)})),
        BadFile,
        (O_PROJ, "found [64, 48]", "says [48, 64]", "hidden_size 48", "num_attention_heads 4", "v_head_dim 16"),
    ),
    Fault(
        "matrix_flat", tensors(lambda f: f.update({O_PROJ: f[O_PROJ].reshape(-1)})), BadFile, (O_PROJ, "[3072]", "hidden_size 48")
    ),
    Fault(
        "largest_sizes",
        config(
            **dict.fromkeys(["hidden_size", "intermediate_size", "moe_intermediate_size"], 1 << 20),
            num_attention_heads=1 << 14,
            num_key_value_heads=1 << 14,
            vocab_size=1 << 24,
        ),
        BadFile,
        ("other shapes", "hidden_size 1048576"),
    ),
    Fault(
        "weights_of_integers",
        tensors(lambda f: f.update({NORM: np.ones(48, np.int32)})),
        Unsupported,
        (NORM, "I32", "weights can be"),
    ),
    Fault(
        "weights_of_other_fp8",
        tensors(lambda f: f.update({NORM: np.ones(48, ml_dtypes.float8_e5m2)})),
        Unsupported,
        (NORM, "F8_E5M2"),
    ),
    # row 9: FP8 and its scales
    Fault("fp8_without_scale", remove(SCALE), BadFile, (f"{O_PROJ} is FP8 without scales", SCALE), "fp8"),
    Fault(
        "scale_without_fp8",
        tensors(lambda f: f.update({O_PROJ: f[O_PROJ].astype(np.float32)})),
        BadFile,
        (f"{SCALE} scales a weight that is not FP8", "F32"),
        "fp8",
    ),
    Fault("scale_without_a_weight", remove(O_PROJ), BadFile, (f"missing: {O_PROJ} (not used, and near: {SCALE})",), "fp8"),
    Fault("scale_of_nothing", add("model.layers.0.self_attn.x_proj.weight_scale_inv"), BadFile, ("not used: ", "x_proj"), "fp8"),
    Fault(
        "scale_of_another_block_count",
        tensors(lambda f: f.update({SCALE: np.ones((3, 2), np.float32)})),
        BadFile,
        (SCALE, O_PROJ, "[48, 64] in blocks of [16, 24] needs [3, 3] scales", "found F32 [3, 2]"),
        "fp8",
    ),
    Fault(
        "scale_of_integers", tensors(lambda f: f.update({SCALE: np.ones((3, 3), np.int32)})), BadFile, (SCALE, "found I32"), "fp8"
    ),
    Fault(
        "block_size_of_another_model",
        config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        BadFile,
        ("in blocks of [128, 128] needs",),
        "fp8",
    ),
    Fault(
        "fp8_norm_with_scale",
        tensors(lambda f: f.update({NORM: np.ones(48, ml_dtypes.float8_e4m3fn), NORM + fp8.SCALE: np.ones(3, np.float32)})),
        BadFile,
        (NORM + fp8.SCALE, "does not fit"),
        "fp8",
    ),
    Fault("scale_nan", element(SCALE, float("nan")), BadFile, (SCALE, O_PROJ, "not positive and finite"), "fp8", True),
    Fault("scale_infinite", element(SCALE, float("inf")), BadFile, (SCALE, O_PROJ, "not positive and finite"), "fp8", True),
    Fault("scale_zero", element(SCALE, 0.0), BadFile, (SCALE, O_PROJ, "not positive and finite"), "fp8", True),
    Fault("scale_negative", element(SCALE, -0.5), BadFile, (SCALE, O_PROJ, "not positive and finite"), "fp8", True),
    # row 10: weights that are no numbers
    Fault("weight_nan", element(NORM, float("nan")), BadFile, (NORM, "NaN or infinity"), reads=True),
    Fault("weight_infinite", element(EMBED, float("-inf")), BadFile, (EMBED, "NaN or infinity"), reads=True),
    Fault(
        "expert_nan",
        element("model.layers.2.mlp.experts.7.down_proj.weight", float("nan")),
        BadFile,
        ("experts.7.down_proj", "NaN"),
        reads=True,
    ),
    Fault("fp8_nan", element(O_PROJ, float("nan")), BadFile, (O_PROJ, "NaN or infinity"), "fp8", True),
    Fault(
        "weight_overflows_float32",
        tensors(lambda f: f.update({NORM: np.full(48, 1e300)})),
        BadFile,
        (NORM, "NaN or infinity"),
        reads=True,
    ),
    # row 12: names and counts
    Fault("tensors_100_001", header_bytes(_TOO_MANY), BadFile, (FILE, "too many tensors", "found 100,001, the limit is 100,000")),
    Fault("name_of_513_bytes", header(lambda e: e.update({"n" * 513: e.pop(NORM)})), BadFile, ("is no tensor name", "513")),
    Fault(
        "name_of_513_bytes_in_171_characters",
        header(lambda e: e.update({"€" * 171: e.pop(NORM)})),
        BadFile,
        ("is no tensor name",),
    ),
    Fault(
        "name_of_100_000_characters", header(lambda e: e.update({"n" * 10**5: e.pop(NORM)})), BadFile, ("nnn...nnn", "100,000")
    ),
    Fault(
        "name_of_half_a_character",
        header(lambda e: e.update({"\ud800": e.pop(NORM)})),
        BadFile,
        ("refused by the safetensors library",),
    ),
    Fault("empty_name", header(lambda e: e.update({"": e.pop(NORM)})), BadFile, ("is no tensor name", "it has 0 characters")),
    Fault("name_with_control_characters", add("\x1b]0;owned\x07\n\0"), BadFile, ("not used: \\x1b]0;owned\\x07\\n\\x00",)),
    Fault("name_with_dots", add("../../etc/passwd"), BadFile, ("not used: ../../etc/passwd",)),
    # row 13: no safetensors
    *(
        Fault(f"only_{s[1:]}", pickles(s), Unsupported, (f"pytorch_model{s}", "pickle", "can run code", "save_pretrained()"))
        for s in (".bin", ".pt", ".pth", ".pkl", ".ckpt")
    ),
    Fault("no_weights", lambda folder: (folder / FILE).unlink(), BadFile, ("holds no weights", "expected *.safetensors")),
)

CONFIG = (
    # row 37: a config.json that is none
    Fault("config_missing", lambda folder: (folder / "config.json").unlink(), BadConfig, ("config.json", "No such file")),
    Fault(
        "config_is_a_folder",
        both(lambda f: (f / "config.json").unlink(), lambda f: (f / "config.json").mkdir()),
        BadConfig,
        ("regular file",),
    ),
    Fault("config_is_a_pipe", pipe_instead_of("config.json"), BadConfig, ("config.json", "not a regular file")),
    Fault("config_empty", config_text(lambda text: ""), BadConfig, ("config.json", "not valid JSON")),
    Fault("config_cut", config_text(lambda text: text[:100]), BadConfig, ("config.json", "not valid JSON")),
    Fault("config_of_1_gb", sparse("config.json", 1 << 30), BadConfig, ("config.json", "too large", "1,048,576")),
    Fault("config_is_a_list", config_text(lambda text: "[]"), BadConfig, ("not a JSON object", "list")),
    Fault("config_not_utf8", raw(lambda d: b'{"a": "\xff"}', "config.json"), BadConfig, ("not valid JSON",)),
    Fault("config_nested", raw(lambda d: b'{"a": ' + _NESTED + b"}", "config.json"), BadConfig, ("nested too deeply",)),
    Fault(
        "config_key_twice", config_text(lambda t: t[:-1] + ', "hidden_size": 48}'), BadConfig, ("key given twice", "hidden_size")
    ),
    Fault("config_nan", config_text(lambda t: t.replace("1e-06", "NaN")), BadConfig, ("not valid JSON", "holds NaN")),
    Fault("config_infinity", config_text(lambda t: t.replace("1e-06", "-Infinity")), BadConfig, ("holds -Infinity",)),
    Fault("config_1e999", config_text(lambda t: t.replace("10000.0", "1e999")), BadConfig, ("number 1e999 is too large",)),
    Fault(
        "config_integer_of_5000_digits",
        config_text(lambda t: t.replace("10000.0", "9" * 5000)),
        BadConfig,
        ("not valid JSON", "number 9999", "is too large"),
    ),
    Fault(
        "config_integer_of_4000_digits",
        config_text(lambda t: t.replace("10000.0", _HUGE)),
        BadConfig,
        ("not valid JSON", "number 9999", "is too large"),
    ),
    Fault(
        "config_without_kv_lora_rank", config(kv_lora_rank=...), BadConfig, ("not an MLA model", "deepseek_v3", "no kv_lora_rank")
    ),
    Fault("config_with_null_kv_lora_rank", config(kv_lora_rank=None), BadConfig, ("not an MLA model", "no kv_lora_rank")),
    Fault(
        "config_without_sizes",
        config(hidden_size=..., vocab_size=...),
        BadConfig,
        ("2 faults", "hidden_size is missing", "vocab_size is missing"),
    ),
    Fault("config_of_no_family", config(model_type=["deepseek_v3"]), BadConfig, ("model_type is not a name", "deepseek_v3")),
    # row 38: values that describe no model
    *(
        Fault(f"{name}_{value}", config(**{name: value}), BadConfig, (f"{name} is {value}",))
        for name, value in [
            ("hidden_size", 0),
            ("num_hidden_layers", -1),
            ("num_hidden_layers", 1 << 31),
            ("vocab_size", 0),
            ("kv_lora_rank", 0),
            ("q_lora_rank", -5),
            ("qk_rope_head_dim", 7),
            ("qk_nope_head_dim", 0),
            ("v_head_dim", 1 << 31),
            ("moe_intermediate_size", 0),
            ("num_experts_per_tok", 0),
            ("num_experts_per_tok", 9),
            ("n_group", 3),
            ("topk_group", 5),
            ("first_k_dense_replace", -1),
            ("moe_layer_freq", 0),
            ("rms_norm_eps", 0),
            ("rms_norm_eps", 2),
            ("rope_theta", -1.0),
            ("max_position_embeddings", 0),
            ("num_nextn_predict_layers", 1000),
            ("n_routed_experts", 0),
            ("hidden_size", 48.5),
            ("hidden_size", True),
            ("norm_topk_prob", 1),
            ("routed_scaling_factor", []),
        ]
    ),
    *(
        Fault(f"heads_{n}", config(num_attention_heads=n, num_key_value_heads=n), BadConfig, (f"num_attention_heads is {n}",))
        for n in (0, -4, 1 << 31)
    ),
    Fault(
        "topk_beyond_experts",
        config(num_experts_per_tok=9),
        BadConfig,
        ("num_experts_per_tok is 9, but n_routed_experts only 8",),
    ),
    Fault("groups_do_not_divide", config(n_group=3), BadConfig, ("n_group is 3, which does not divide n_routed_experts 8",)),
    Fault(
        "topk_beyond_kept_groups",
        config(topk_group=1),
        BadConfig,
        ("num_experts_per_tok is 3, but 1 groups hold only 2 experts",),
    ),
    Fault(
        "unknown_routing",
        config(topk_method="hash", scoring_func="sqrtsoftplus"),
        BadConfig,
        ("2 faults", "hash", "sqrtsoftplus"),
    ),
    Fault(
        "sizes_are_texts",
        config(hidden_size="48", eos_token_id="</s>"),
        BadConfig,
        ("hidden_size is '48'", "eos_token_id is ('</s>',)"),
    ),
    Fault(
        "token_ids_out_of_range", config(eos_token_id=[1, 1 << 40], bos_token_id=-1), BadConfig, ("bos_token_id", "eos_token_id")
    ),
    Fault(
        "layer_types_of_another_length",
        config(mlp_layer_types=["dense"]),
        BadConfig,
        ("mlp_layer_types has 1 entries for 3 layers",),
    ),
    Fault(
        "layer_types_of_other_words",
        config(mlp_layer_types=["dense", "mamba", "dense"]),
        BadConfig,
        ("other words than dense and sparse",),
    ),
    Fault("rope_scaling_is_a_text", config(rope_scaling="yarn"), BadConfig, ("RoPE settings", "yarn")),
    Fault(
        "rope_scaling_of_texts",
        config(rope_scaling={"type": "yarn", "factor": "40"}),
        BadConfig,
        ("rope_scaling.factor is '40'",),
    ),
    Fault("rope_factor_negative", config(rope_scaling=models.yarn(-4, 1, 1)), BadConfig, ("rope_scaling.factor is -4",)),
    Fault(
        "rope_of_huge_integers",
        config(rope_scaling=models.yarn(int(_HUGE), 1, 1)),
        BadConfig,
        ("not valid JSON", "number 9999", "is too large"),
    ),
    Fault(
        "block_size_of_zero",
        config(quantization_config={"quant_method": "fp8", "weight_block_size": [0, 128]}),
        BadConfig,
        ("weight_block_size",),
    ),
    Fault(
        "scale_format_is_a_list",
        config(quantization_config={"quant_method": "fp8", "scale_fmt": []}),
        BadConfig,
        ("scale_fmt is []",),
    ),
    Fault(
        "every_size_wrong",
        config(
            num_attention_heads=0,
            num_key_value_heads=0,
            kv_lora_rank=-1,
            q_lora_rank=-1,
            qk_rope_head_dim=7,
            num_experts_per_tok=0,
            hidden_size=0,
        ),
        BadConfig,
        (
            "6 faults",
            "num_attention_heads is 0",
            "kv_lora_rank is -1",
            "q_lora_rank is -1",
            "qk_rope_head_dim is 7",
            "num_experts_per_tok is 0",
            "hidden_size is 0",
            "expected an even number",
        ),
    ),
    Fault(
        "every_route_wrong",
        config(num_experts_per_tok=9, n_group=3, topk_group=4),
        BadConfig,
        ("3 faults", "is 9", "n_group is 3", "topk_group is 4"),
    ),
)
FAULTS = SAFETENSORS + CONFIG
