"""The released folders that mutations start from, and ways to change one."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import models
import numpy as np
from faults import change
from faults.change import rename
from safetensors.numpy import save_file
from weights import fp8

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


def raw(edit: Callable[[bytes], bytes], file: str = FILE):
    return change.raw(edit, file)


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


def without(*names: str):
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
    return rename((FILE, f"pytorch_model{suffix}"))
