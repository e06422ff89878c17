"""Every bad folder of DeepSeek's own parts."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from faults import hf
from faults.change import Fault, copy, remove, rename, sparse
from weights import as_deepseek, fp8

from mla_jax.base.errors import BadConfig, BadFile

FIRST, SECOND = "model0-mp2.safetensors", "model1-mp2.safetensors"
WQ_B, NORM, EXPERT = "layers.0.attn.wq_b.weight", "layers.0.attn_norm.weight", "layers.1.ffn.experts.0.w1.weight"
WHOLE = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "qk_nope_head_dim": 56, "q_lora_rank": 128}
FP8 = {**hf.HF, **WHOLE, "v_head_dim": 64, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
SCALE = WQ_B.removesuffix("weight") + "scale"


def write_valid(root: Path) -> None:
    as_deepseek.write(root / "single", hf.HF, hf.models.tensors(hf.HF), 2)
    as_deepseek.write(root / "fp8", FP8, fp8.quantized(hf.models.tensors(FP8), (128, 128)), 2)


def tensors(edit: Callable[[dict], object], *files: str):
    return lambda folder: [hf.tensors(edit, file)(folder) for file in files or (FIRST, SECOND)]


def of(name: str, change: Callable[[np.ndarray], np.ndarray], *files: str):
    return tensors(lambda found: found.update({name: change(found[name])}), *files)


def without(name: str, *files: str):
    return tensors(lambda found: found.pop(name), *files)


def own_config(**arguments):
    """The inference code's own config, in which absent keys have that code's default."""
    return lambda folder: (folder / "config.json").write_text(json.dumps({"dim": 48, **arguments}))


FAULTS = (
    # which parts there are
    Fault("part_missing", remove(SECOND), BadFile, ("lacks 1 of its 2 weight files", SECOND, "fetch them again")),
    Fault("part_of_another_conversion", copy(FIRST, "model0-mp4.safetensors"), BadFile, ("parts of several conversions", "mp4")),
    Fault("part_beyond_the_count", copy(FIRST, "model7-mp2.safetensors"), BadFile, ("holds 3 parts of 2", "model7-mp2")),
    Fault(
        "part_counted_with_zeros", rename((SECOND, "model01-mp2.safetensors")), BadFile, ("lacks 1 of its 2 weight files", SECOND)
    ),
    Fault(
        "parts_of_none",
        lambda folder: [remove(FIRST, SECOND)(folder), (folder / "model0-mp0.safetensors").touch()],
        BadFile,
        ("holds 1 parts of 0",),
    ),
    Fault(
        "parts_of_a_number_of_5_000_digits",
        lambda folder: [remove(FIRST, SECOND)(folder), (folder / f"model0-mp{'9' * 200}.safetensors").touch()],
        BadFile,
        ("lacks", "of its 999", "weight files"),
    ),
    Fault("part_is_a_folder", lambda f: [remove(SECOND)(f), (f / SECOND).mkdir()], BadFile, (SECOND, "not a regular file")),
    Fault("part_cut", lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:-9]), BadFile, (SECOND, "cut short")),
    Fault("part_of_zeros", sparse(SECOND, 1 << 30), BadFile, (SECOND, "not valid JSON")),
    Fault(
        "part_links_out_of_the_folder",
        lambda f: [(f / SECOND).rename(f.parent / SECOND), (f / SECOND).symlink_to(f.parent / SECOND)],
        BadFile,
        (SECOND, "leaves the model folder"),
    ),
    # their contents
    Fault("part_repeated", copy(FIRST, SECOND), BadFile, ("not those of one model", "is in 2 of 2 parts, expected 1")),
    Fault(
        "tensor_in_one_part_only",
        without(WQ_B, SECOND),
        BadFile,
        (f"{WQ_B} is in 1 of 2 parts, expected 2", "fetch or convert all of them again"),
    ),
    Fault("expert_in_no_part", without(EXPERT, FIRST), BadFile, (f"missing: {EXPERT}",)),
    Fault(
        "expert_in_two_parts",
        lambda f: tensors(lambda t: t.update({EXPERT: hf.load_file(f / FIRST)[EXPERT]}), SECOND)(f),
        BadFile,
        (f"{EXPERT} is in 2 of 2 parts, expected 1",),
    ),
    Fault("parts_of_two_shapes", of(WQ_B, lambda w: w[:-1], SECOND), BadFile, (f"{WQ_B} has 2 shapes or dtypes",)),
    Fault("parts_of_two_dtypes", of(WQ_B, np.float64, SECOND), BadFile, (f"{WQ_B} has 2 shapes or dtypes",)),
    Fault("all_parts_too_short", of(WQ_B, lambda w: w[:-1]), BadFile, (WQ_B, "found [94, 24]", "says [96, 24]", "num_attention")),
    Fault("cut_matrix_of_no_dimension", of(WQ_B, lambda w: np.array(w[0, 0])), BadFile, (WQ_B, "found []", "says [96, 24]")),
    Fault("uncut_norm_too_long", of(NORM, lambda w: np.tile(w, 2)), BadFile, (NORM, "found [96]", "says [48]", "hidden_size 48")),
    Fault("tensor_not_used", tensors(lambda t: t.update(more=np.ones(2))), BadFile, ("not used: more",)),
    Fault(
        "names_of_a_released_folder",
        tensors(lambda t: [t.update({"model." + name: t.pop(name)}) for name in list(t)]),
        BadFile,
        ("num_hidden_layers is 3, layers.* has 0", "such as model."),
    ),
    # FP8
    Fault("fp8_without_scale", without(SCALE), BadFile, (f"{WQ_B} is F8_E4M3 without scale", SCALE), "fp8"),
    Fault("scale_in_one_part_only", without(SCALE, FIRST), BadFile, (f"{SCALE} is in 1 of 2 parts",), "fp8"),
    Fault("scales_of_another_count", of(SCALE, lambda w: np.tile(w, (2, 1))), BadFile, (SCALE, "needs [2, 1] of F32"), "fp8"),
    Fault("scale_of_nothing", tensors(lambda t: t.update({"more.scale": np.ones((1, 1))})), BadFile, ("not used: more",), "fp8"),
    Fault("scale_negative", of(SCALE, np.negative), BadFile, (SCALE, "not positive and finite"), "fp8", True),
    # config.json
    Fault("config_missing", remove("config.json"), BadConfig, ("has no config.json", "copy the released model's there")),
    Fault("config_of_unknown_arguments", own_config(window=4), BadConfig, ("does not know", "window")),
    Fault("config_of_another_model", own_config(), BadFile, ("num_hidden_layers is 27, layers.* has 3",)),
    Fault("config_of_texts", own_config(n_layers="3"), BadConfig, ("num_hidden_layers is '3'",)),
    *(
        Fault(f"config_of_length_{value}", own_config(original_seq_len=value), BadConfig, ("no possible original_seq_len",))
        for value in (0, -4, 2**31, "4096", None)
    ),
    Fault("config_of_lists", own_config(score_func=["sigmoid"], n_expert_groups=[]), BadConfig, ("scoring_func is",)),
)
