"""Every bad folder of safetensors."""

import json
import struct

import ml_dtypes
import numpy as np
from faults.change import (
    Fault,
    both,
    folder_instead_of,
    link_to_itself,
    pipe_instead_of,
    remove,
    rename,
    sparse,
)
from faults.hf import (
    EMBED,
    FILE,
    FIRST,
    INDEX,
    NORM,
    O_PROJ,
    SCALE,
    SECOND,
    add,
    config,
    duplicate_key,
    element,
    entry,
    header,
    header_bytes,
    hole,
    index,
    index_of_other_tensors,
    linked_out,
    mapped_to,
    mapped_to_absolute_path,
    mapped_to_parent_path,
    overlap,
    pickles,
    raw,
    shard_of_other_name,
    tensors,
    without,
)
from safetensors.numpy import save_file
from weights import fp8

from mla_jax.base.errors import BadFile, Unsupported

_FLOAT = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
NESTED = b"[" * 100_000 + b"]" * 100_000
_TOO_MANY = json.dumps({f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(100_001)}).encode()

FAULTS = (
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
    Fault("header_nested_100_000_deep", header_bytes(NESTED), BadFile, ("nested too deeply",)),
    Fault("entry_nested_100_000_deep", header_bytes(b'{"a": ' + NESTED + b"}"), BadFile, ("nested too deeply",)),
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
    Fault("mapped_with_half_a_character", mapped_to("\ud800.safetensors"), BadFile, ("half of a surrogate pair",), "sharded"),
    Fault("mapped_to_no_safetensors", mapped_to("config.json"), BadFile, ("config.json", "ends in .safetensors"), "sharded"),
    Fault("mapped_to_nothing", mapped_to(""), BadFile, ("'' is not a name of a file in the folder",), "sharded"),
    Fault("mapped_to_dots", mapped_to(".."), BadFile, ("not a name of a file in the folder",), "sharded"),
    Fault("mapped_to_a_long_name", mapped_to("é" * 200 + ".safetensors"), BadFile, ("not a name of a file",), "sharded"),
    Fault("shard_links_out_of_the_folder", linked_out, BadFile, (FIRST, "leaves the model folder", "outside"), "sharded"),
    Fault("shard_links_to_itself", link_to_itself(FIRST), BadFile, (FIRST,), "sharded"),
    Fault(
        "file_links_out_of_the_folder",
        both(rename((FILE, FIRST)), linked_out, rename((FIRST, FILE))),
        BadFile,
        ("leaves the model folder",),
    ),
    Fault("shard_is_a_pipe", pipe_instead_of(FIRST), BadFile, (FIRST, "not a regular file"), "sharded"),
    Fault(
        "shard_is_a_folder",
        folder_instead_of(FIRST),
        BadFile,
        ("not a regular file",),
        "sharded",
    ),
    # row 6: the index and the files disagree
    Fault(
        "shard_missing",
        remove(SECOND),
        BadFile,
        ("index", "disagree", f"{SECOND} is missing"),
        "sharded",
    ),
    Fault(
        "shard_missing_and_another_not_known",
        shard_of_other_name,
        BadFile,
        (f"{FIRST} is missing", f"is in {SECOND} and in model-00003"),
        "sharded",
    ),
    Fault(
        "index_of_other_tensors",
        index(index_of_other_tensors),
        BadFile,
        (f"model.layers.0.extra is not in {FIRST}", f"{EMBED} is not in"),
        "sharded",
    ),
    Fault(
        "no_index_and_a_part_missing",
        remove(INDEX, FIRST),
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
    Fault("tensor_missing", without(NORM), BadFile, ("do not fit the model", f"missing: {NORM}")),
    Fault("tensor_not_used", add("model.layers.0.self_attn.sinks"), BadFile, ("not used: model.layers.0.self_attn.sinks",)),
    Fault(
        "tensor_misspelt",
        both(add("model.layers.0.self_attn.o_prj.weight", (48, 64)), without(O_PROJ)),
        BadFile,
        (f"missing: {O_PROJ} (not used, but similar: model.layers.0.self_attn.o_prj.weight)",),
    ),
    Fault(
        "nine_tensors_missing",
        without(*(f"model.layers.1.mlp.experts.{x}.{p}_proj.weight" for x in range(3) for p in ("gate", "up", "down"))),
        BadFile,
        ("missing: model.layers.1.mlp.experts.0.gate_proj.weight", "missing: 1 more"),
    ),
    Fault("rotary_table_of_another_name", add("model.layers.0.mlp.rotary_emb.inv_freq"), BadFile, ("not used: ", "rotary_emb")),
    Fault("mtp_copy_in_a_main_layer", add("model.layers.0.shared_head.head.weight"), BadFile, ("not used: ", "shared_head")),
    Fault("mtp_layer_not_announced", add("model.layers.3.enorm.weight"), BadFile, ("not used: model.layers.3.enorm.weight",)),
    Fault(
        "head_of_a_model_that_ties_it",
        both(config(tie_word_embeddings=False), without("lm_head.weight")),
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
    Fault("fp8_without_scale", without(SCALE), BadFile, (f"{O_PROJ} is F8_E4M3 without weight_scale_inv", SCALE), "fp8"),
    Fault(
        "scale_without_fp8",
        tensors(lambda f: f.update({O_PROJ: f[O_PROJ].astype(np.float32)})),
        BadFile,
        (f"{SCALE} belongs to a packed weight", "F32"),
        "fp8",
    ),
    Fault("scale_without_a_weight", without(O_PROJ), BadFile, (f"missing: {O_PROJ} (not used, but similar: {SCALE})",), "fp8"),
    Fault("scale_of_nothing", add("model.layers.0.self_attn.x_proj.weight_scale_inv"), BadFile, ("not used: ", "x_proj"), "fp8"),
    Fault(
        "scale_of_another_block_count",
        tensors(lambda f: f.update({SCALE: np.ones((3, 2), np.float32)})),
        BadFile,
        (SCALE, O_PROJ, "[48, 64] in blocks of [16, 24] needs [3, 3] of F32", "found F32 [3, 2]"),
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
    Fault("name_of_513_bytes", header(lambda e: e.update({"n" * 513: e.pop(NORM)})), BadFile, ("is not a tensor name", "513")),
    Fault(
        "name_of_513_bytes_in_171_characters",
        header(lambda e: e.update({"€" * 171: e.pop(NORM)})),
        BadFile,
        ("is not a tensor name",),
    ),
    Fault(
        "name_of_100_000_characters", header(lambda e: e.update({"n" * 10**5: e.pop(NORM)})), BadFile, ("nnn...nnn", "100,000")
    ),
    Fault(
        "name_of_half_a_character",
        header(lambda e: e.update({"\ud800": e.pop(NORM)})),
        BadFile,
        (f"the header of {FILE}", "half of a surrogate pair"),
    ),
    Fault("empty_name", header(lambda e: e.update({"": e.pop(NORM)})), BadFile, ("is not a tensor name", "it has 0 characters")),
    Fault("name_with_control_characters", add("\x1b]0;owned\x07\n\0"), BadFile, ("not used: \\x1b]0;owned\\x07\\n\\x00",)),
    Fault("name_with_dots", add("../../etc/passwd"), BadFile, ("not used: ../../etc/passwd",)),
    # row 13: no safetensors
    *(
        Fault(f"only_{s[1:]}", pickles(s), Unsupported, (f"pytorch_model{s}", "pickle", "can run code", "save_pretrained()"))
        for s in (".bin", ".pt", ".pth", ".pkl", ".ckpt")
    ),
    Fault("no_weights", remove(FILE), BadFile, ("holds no weights", "expected *.safetensors")),
)
