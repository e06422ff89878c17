"""Every bad folder of what mla-convert writes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import change, hf
from faults.change import Fault, both, folder_instead_of, pipe_instead_of, remove, sparse
from faults.safetensors_corpus import NESTED

from convert.__main__ import main
from mla_jax.base.errors import BadConfig, BadFile, Unsupported

FILE, NORM, UP = "manifest.json", "norm", "layers.1.mlp.experts.up"
EMBED = "embed"  # which is read first


def write_valid(root: Path) -> None:
    hf.write_valid(root / "from")
    for base in ("single", "fp8"):
        assert main([str(root / "from" / base), str(root / base)]) == 0
    shutil.rmtree(root / "from")


def raw(edit: Callable[[bytes], bytes]):
    return change.raw(edit, FILE)


def manifest(edit: Callable[[dict], object]):
    """Changes the parsed manifest."""

    def changed(data: bytes) -> bytes:
        content = json.loads(data)
        edit(content)
        return json.dumps(content).encode()

    return raw(changed)


def top(**changes):
    return manifest(lambda content: content.update(changes))


def entry(name: str = NORM, **changes):
    return manifest(lambda content: content["tensors"][name].update(changes))


def part(name: str = NORM, number: int = 0, **changes):
    return manifest(lambda content: content["tensors"][name]["parts"][number].update(changes))


def renamed(to: str, name: str = NORM):
    return manifest(lambda content: content["tensors"].update({to: content["tensors"].pop(name)}))


def senseless(name: str, mutate: Callable[[Path], Any]) -> Fault:
    return Fault(name, mutate, BadFile, (FILE, "invalid entry", "found {"))


def chunk(act: Callable[[Path], object], name: str = EMBED):
    """Does something to the file of a tensor's first chunk."""

    def mutate(folder: Path):
        (leaf,) = (folder / "weights").glob(f"*/state/{name}.0.0")
        act(next(path for path in (leaf / "c").rglob("*") if path.is_file()))

    return mutate


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


FAULTS = (
    # the manifest as a file
    Fault("manifest_missing", remove(FILE), BadFile, ("holds no weights",)),
    Fault("manifest_is_a_folder", folder_instead_of(FILE), BadFile, ("holds no weights",)),
    Fault("manifest_is_a_pipe", pipe_instead_of(FILE), BadFile, ("holds no weights",)),
    Fault("manifest_empty", raw(lambda d: b""), BadFile, (FILE, "not valid JSON")),
    Fault("manifest_cut", raw(lambda d: d[:-1]), BadFile, (FILE, "not valid JSON")),
    Fault("manifest_cut_in_half", raw(lambda d: d[: len(d) // 2]), BadFile, (FILE, "not valid JSON")),
    Fault("manifest_not_utf8", raw(lambda d: d[:-1] + b', "\xff": 1}'), BadFile, (FILE, "not valid JSON", "utf-8")),
    Fault("manifest_nested", raw(lambda d: b'{"a": ' + NESTED + b"}"), BadFile, ("nested too deeply",)),
    Fault("manifest_is_a_list", raw(lambda d: b"[]"), BadFile, (FILE, "not a JSON object")),
    Fault("manifest_of_1_gb", sparse(FILE, 1 << 30), BadFile, (FILE, "too large", "67,108,864")),
    Fault("key_twice", raw(lambda d: d[:-1] + b', "version": 1}'), BadFile, ("key given twice", "version")),
    Fault("number_of_400_digits", raw(lambda d: d.replace(b'"step": 0', b'"step": ' + b"9" * 400)), BadFile, ("too large",)),
    # what it says of itself
    Fault("other_kind", top(kind="weights"), BadFile, (FILE, "not a manifest of weights", "mla-convert wrote")),
    Fault("kind_is_a_list", top(kind=[]), BadFile, (FILE, "not a manifest of weights")),
    Fault("newer_version", top(version=2), BadFile, ("version 2 of its format", "up to 1", "update mla-jax")),
    Fault("version_of_2_to_64", top(version=1 << 64), BadFile, ("version 18446744073709551616 of its format",)),
    Fault("version_0", top(version=0), BadFile, ("not a manifest of weights",)),
    Fault("version_is_a_text", top(version="1"), BadFile, ("not a manifest of weights",)),
    Fault("not_complete", top(complete=False), BadFile, ("is not complete", "run the same command again")),
    Fault("complete_is_a_number", top(complete=1), BadFile, ("not a manifest of weights",)),
    Fault("tensors_are_a_list", top(tensors=[]), BadFile, ("not a manifest of weights",)),
    Fault("no_metadata", manifest(lambda m: m.pop("metadata")), BadFile, ("not a manifest of weights",)),
    *(
        Fault(f"metadata_of_{key}", top(metadata={key: value}), BadFile, (FILE, "invalid metadata"))
        for key, value in {"scales": ["F32"], "copies": ["embed"]}.items()
    ),
    # its tensors
    senseless("entry_is_a_number", manifest(lambda m: m["tensors"].update({NORM: {"parts": 7}}))),
    *(senseless(f"entry_without_{key}", manifest(lambda m, key=key: m["tensors"][NORM].pop(key))) for key in ("shape", "parts")),
    *(senseless(f"step_{value}", entry(step=value)) for value in (-1, 1.0, "0", None, True)),
    senseless("shape_too_short", entry(shape=[])),
    senseless("shape_negative", entry(shape=[-48])),
    senseless("shape_of_2_to_70", entry(shape=[1 << 70])),
    senseless("shape_of_a_text", entry(shape="48")),
    senseless("shape_of_fractions", entry(shape=[48.0])),
    senseless("shape_of_its_part_too_large", part(shape=[1 << 40])),
    senseless("shape_of_another_rank", part(shape=[6, 8])),
    senseless("shape_of_nothing", both(entry(shape=[]), part(shape=[], chunk=[], checksums=[]))),
    senseless("chunk_of_0", part(chunk=[0])),
    senseless("chunk_negative", part(chunk=[-48])),
    senseless("chunk_of_another_rank", part(chunk=[48, 1])),
    senseless("chunk_too_small", part(chunk=[47])),
    senseless("chunks_of_one_each_of_2_to_62", both(entry(shape=[1 << 62]), part(shape=[1 << 62], chunk=[1]))),
    senseless("checksums_too_few", part(UP, chunk=[4, 24, 48])),
    senseless("checksums_too_many", part(checksums=["0" * 16] * 2)),
    senseless("checksum_is_a_number", part(checksums=[0])),
    senseless("checksums_none", part(checksums=[])),
    senseless("part_missing", entry(parts=[])),
    senseless("parts_one_too_many", manifest(lambda m: m["tensors"][NORM]["parts"].append(m["tensors"][NORM]["parts"][0]))),
    senseless("dtype_of_another_size", part(dtype="float64")),
    senseless("dtype_is_a_list", part(dtype=[])),
    senseless("format_is_a_list", entry(format=[])),
    senseless("format_of_another_size", entry(format="F32")),
    Fault("format_unknown", entry(format="Q9_X"), Unsupported, ("no quantised format Q9_X", "known: ")),
    Fault("format_of_huge_blocks", entry(format="fp8_block_999999x999999"), BadFile, ("fp8_block",)),
    *(
        Fault(f"name_{i}", renamed(name), BadFile, ("cannot name a tensor", "A-Z a-z 0-9"))
        for i, name in enumerate(("a/b", "../../etc/passwd", "..", "/etc/passwd", "", ".hidden", "a\\b", "a\0b", "n" * 201, "é"))
    ),
    Fault("name_with_escape_codes", renamed("\x1b[2J"), BadFile, ("\\x1b[2J cannot name a tensor",)),
    # what the model needs
    Fault("tensor_missing", manifest(lambda m: m["tensors"].pop(NORM)), BadFile, (f"missing: {NORM}",)),
    Fault("tensor_of_another_name", renamed("more"), BadFile, (f"missing: {NORM}", "not used: more")),
    Fault("config_missing", remove("config.json"), BadConfig, ("config.json", "No such file")),
    Fault("config_of_another_model", hf.config(hidden_size=64), BadFile, ("found [96, 48]", "says [96, 64]", "hidden_size 64")),
    Fault("config_of_more_layers", hf.config(num_hidden_layers=1000), BadFile, ("num_hidden_layers is 1000, layers.* has 3",)),
    Fault("config_of_more_experts", hf.config(n_routed_experts=16), BadFile, ("n_routed_experts 16",)),
    # the weights
    Fault("step_missing", lambda f: shutil.rmtree(f / "weights" / "00001"), BadFile, ("00001 is missing", "convert again")),
    Fault(
        "step_is_a_file",
        lambda f: [shutil.rmtree(f / "weights" / "00001"), (f / "weights" / "00001").touch()],
        BadFile,
        ("00001 is missing",),
    ),
    Fault("step_of_another_number", entry(step=7), BadFile, ("00007 is missing",)),
    Fault("step_of_2_to_62", entry(step=1 << 62), BadFile, ("4611686018427387904 is missing",)),
    Fault(
        "tensor_in_another_step",
        entry(EMBED, step=1),
        BadFile,
        ("does not match the manifest", "missing"),
        reads=True,
    ),
    Fault("byte_flipped", chunk(flip), BadFile, ("embed is damaged", "embed.0.0", "weights/00000"), reads=True),
    Fault("byte_of_scales_flipped", chunk(flip, "layers.0.attn.o_proj"), BadFile, ("o_proj is damaged",), "fp8", True),
    Fault("chunk_missing", chunk(Path.unlink), BadFile, ("embed cannot be read", "missing, cut short or damaged"), reads=True),
    Fault("chunk_cut", chunk(lambda file: os.truncate(file, 95)), BadFile, ("embed cannot be read",), reads=True),
    Fault("chunk_too_long", chunk(lambda file: os.truncate(file, 1 << 20)), BadFile, ("embed cannot be read",), reads=True),
    Fault("chunk_empty", chunk(lambda file: os.truncate(file, 0)), BadFile, ("embed cannot be read",), reads=True),
    Fault("chunk_is_a_folder", chunk(lambda file: [file.unlink(), file.mkdir()]), BadFile, ("embed cannot be read",), reads=True),
    Fault("checksum_of_another_array", part(EMBED, checksums=["0" * 16]), BadFile, ("embed is damaged", "not 0000"), reads=True),
)
