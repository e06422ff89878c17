"""Runs a model that was exported by mla-jax: reads prompts as token ids, decodes greedily, prints token ids, a line a prompt.

It needs jax, numpy, ml_dtypes and flatbuffers alone. manifest.json in its folder says what is called here, and how:

    python run.py --prompt 0,17,29 --prompt 0,4 --max-tokens 32

Each prompt has a row, and each row its own pages. Programs are code: run exports of those alone whose code you would run."""

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

FORMAT = "mla-jax export 2"
AXES = ("data", "tensor", "context")
SIZES = ("rows", "prompt", "context", "page", "pages", "width", "steps")
PROGRAMS = ("admit", "prefill", "run")
PLATFORMS = ("cpu", "cuda", "tpu")
MOST = 1 << 24  # of rows, pages, tokens and devices
MOST_ON_CPU = 256  # devices that a CPU simulates
MOST_BYTES = 1 << 26  # of a manifest, and of a header
SAFETENSORS = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "BF16": "bfloat16",
    "BOOL": "bool",
    **{f"F{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"I{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"U{n}": f"uint{n}" for n in (8, 16, 32, 64)},
}
Described = Mapping[str, Any]  # an array of the manifest


def stop(said: str) -> NoReturn:
    sys.exit(f"error: {said}")


def dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def number(value: Any, name: str, least: int = 1, most: int = MOST) -> int:
    if type(value) is not int or not least <= value <= most:
        stop(f"{name} is {str(value)[:40]}, expected a whole number from {least} to {most:,}")
    return value


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Ends the run with one line where a file's contents are not of the expected form."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as e:
        stop(f"{path} is damaged: {type(e).__name__} {str(e)[:80]}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """manifest.json, whose numbers are bounded and whose arrays have shapes, dtypes and mesh axes that exist."""
    path = inside(folder, "manifest.json")
    if path.stat().st_size > MOST_BYTES:
        stop(f"{path} has more than {MOST_BYTES:,} bytes")
    with damage_named(path):
        manifest = json.loads(path.read_bytes())
        if manifest["format"] != FORMAT:
            stop(f"{path} has another format than {FORMAT}: run the run.py that lies beside it")
        check_sizes(manifest)
        for one in manifest["weights"]:
            check_array(one)
        if not {*PLATFORMS} >= manifest["platforms"].keys() > set():
            raise ValueError("platforms")
        for platform in manifest["platforms"].values():
            check_platform(platform)
    return manifest


def check_sizes(manifest: Mapping[str, Any]) -> None:
    for axis in AXES:
        number(manifest["mesh"][axis], f"the mesh's {axis}")
    sizes, vocabulary = manifest["sizes"], number(manifest["config"]["vocab_size"], "vocab_size")
    for name in SIZES:
        number(sizes[name], name)
    if sizes["pages"] != sizes["rows"] * sizes["width"] or sizes["width"] * sizes["page"] < sizes["context"]:
        raise ValueError("pages")
    for token in manifest["ends"]:
        number(token, "an end token", 0, vocabulary - 1)
    for known in manifest["files"].values():
        number(known["bytes"], "the size of a file", 0, MOST * MOST)


def check_platform(platform: Mapping[str, Any]) -> None:
    """Raises ValueError and the like, as `check_array`."""
    kept = {check_array(one) for one in platform["kept"]}
    programs = platform["programs"]
    for name in PROGRAMS:
        for one in programs[name]["sent"]:
            check_array(one)
        if not kept >= {*programs[name]["kept"]}:
            raise ValueError(name)
    for one in programs["run"]["returned"][0]["fields"]:
        check_array(one)
    options = [platform["kernels"], *platform["compiler_options"].values()]
    if not all(isinstance(value, bool | int | str) for value in options):
        raise ValueError("compiler_options")


def check_array(one: Described) -> str:
    """The array's name."""
    dtype(one["dtype"])
    if not isinstance(one["name"], str) or len(one["shape"]) > 8:
        raise ValueError(one["name"])
    for size in one["shape"]:
        number(size, f"the shape of {one['name']}", 0, MOST * MOST)
    cuts = one.get("sharding", [])
    if len(cuts) not in (0, len(one["shape"])) or not {axis for cut in cuts for axis in cut} <= {*AXES}:
        raise ValueError(one["name"])
    return one["name"]


def inside(folder: Path, name: Any) -> Path:
    """A file of the folder. Absolute names, `..` and links out of the folder are refused."""
    plain = isinstance(name, str) and re.fullmatch(r"(?:[\w-][\w.-]*/)*[\w-][\w.-]*", name)
    path = (folder / name).resolve() if plain else folder
    if not plain or not path.is_relative_to(folder.resolve()):
        stop(f"the file {str(name)[:80]!r} is not in {folder}")
    if not path.is_file():
        stop(f"there is no file {folder / name}")
    return path


def checked(folder: Path, manifest: Mapping[str, Any], name: Any) -> Path:
    """A file of the folder, whose size and SHA-256 are those of its manifest."""
    path = inside(folder, name)
    known = manifest["files"].get(name, {})
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if (path.stat().st_size, digest) != (known.get("bytes"), known.get("sha256")):
        stop(f"{path} is damaged: its size or its SHA-256 is not that of manifest.json")
    return path


def tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a safetensors file, mapped: only the parts that devices take are read."""
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > MOST_BYTES:
            stop(f"{file} is damaged: its header has {length:,} bytes")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start, shape = 8 + length + entry["data_offsets"][0], tuple(entry["shape"])
        yield name, np.memmap(file, dtype(SAFETENSORS[entry["dtype"]]), "r", start, shape)


class Model:
    """The programs for one platform, with weights, an empty pool and an empty table of rows on the devices."""

    def __init__(self, folder: Path, manifest: dict[str, Any], platform: str, weights: Path | None = None):
        self.sizes, self.shards = manifest["sizes"], manifest["mesh"]["data"]
        self._vocabulary = manifest["config"]["vocab_size"]
        self._on_mesh = prod(manifest["mesh"][axis] for axis in AXES) > 1
        self._mine = manifest["platforms"][platform]
        place = placing([manifest["mesh"][axis] for axis in AXES])
        self._sent_to = place({"sharding": [["data"]]} if self._on_mesh else {})
        kept = {one["name"]: one for one in self._mine["kept"]}
        self._programs = {}
        for name in PROGRAMS:
            entry = self._mine["programs"][name]
            taken = [*manifest["weights"], *(kept[one] for one in entry["kept"])]
            file = checked(folder, manifest, entry.get("file"))
            self._programs[name] = program(file, taken, entry["sent"], self._mine["compiler_options"])
        self._weights = read_weights(weights or folder, manifest["weights"], place)
        self._kept = {name: zeros(one, place) for name, one in kept.items()}

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, ends: Sequence[int]) -> list[list[int]]:
        """Greedy continuations of at most as many prompts as there are rows, each of at most `tokens` tokens."""
        number(tokens, "the number of new tokens")
        for prompt in prompts:
            number(len(prompt) + tokens, "prompt and new tokens together", 2, self.sizes["context"])
            number(len(prompt), "the length of a prompt")
            for token in prompt:
                number(token, "a token", 0, self._vocabulary - 1)
        number(len(ends), "the number of end tokens", 0, self._shape("admit", "entry.sampling.ends")[1])
        for row, prompt in enumerate(prompts):
            self._admit(row, len(prompt), tokens, ends)
            self._read(row, prompt)
        return self._decode(len(prompts), tokens)

    def _admit(self, row: int, length: int, tokens: int, ends: Sequence[int]) -> None:
        end = np.full(self._shape("admit", "entry.sampling.ends"), -1)
        end[:, : len(ends)] = ends
        self._call_row(
            "admit", row, {"entry.prompt": length, "entry.limit": tokens, "entry.sampling.ends": end}
        )

    def _read(self, row: int, prompt: Sequence[int]) -> None:
        """Reads a prompt in pieces of as many tokens as a call takes."""
        (length,), pages = self._shape("prefill", "tokens"), self._pages(np.array([row % self.sizes["rows"]]))
        for first in range(0, len(prompt), length):
            piece = prompt[first : first + length]
            line = np.zeros(length, np.int32)
            line[: len(piece)] = piece
            self._call_row("prefill", row, {"tokens": line, "counts": len(piece), "page_table": pages})

    def _decode(self, count: int, tokens: int) -> list[list[int]]:
        """Runs the first rows together until all are done."""
        rows, found = self.sizes["rows"], [[] for _ in range(count)]
        every = np.arange(self.shards * rows)
        at = np.where(every < count, every % rows, rows).reshape(self.shards, rows)
        sent = [{"at": one, "page_table": self._pages(one), "steps": self.sizes["steps"]} for one in at]
        for _ in range(tokens):  # each call chooses at least one for every row that is not done
            chosen = self._fields(self._call("run", sent)[0])
            if not chosen["finite"][:count].all():
                stop("the logits are not finite")
            for answer, new, length in zip(found, chosen["tokens"], chosen["count"], strict=False):
                answer += new[: length[0]].tolist()
            if chosen["done"][:count].all():
                break
        return found

    def _call_row(self, name: str, row: int, arrays: Mapping[str, Any]) -> None:
        """Calls a program for one row, counted over all data shards; no other row takes part."""
        at = np.full(self._shape(name, "at"), self.sizes["rows"])
        sent: list[Mapping[str, Any]] = [{"at": at}] * self.shards
        mine = at.copy()
        mine[0] = row % self.sizes["rows"]
        sent[row // self.sizes["rows"]] = {**arrays, "at": mine}
        self._call(name, sent)

    def _call(self, name: str, shards: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Calls a program with arguments for each data shard, and returns its arrays that are not kept."""
        import jax

        entry = self._mine["programs"][name]
        packed = np.stack([pack(entry["sent"], arrays) for arrays in shards])
        sent = jax.device_put(packed if self._on_mesh else packed[0], self._sent_to)
        values = self._programs[name](self._weights, [self._kept[one] for one in entry["kept"]], sent)
        self._kept |= dict(zip(entry["kept"], values, strict=False))
        return values[len(entry["kept"]) :]

    def _pages(self, at: np.ndarray) -> np.ndarray:
        """Page tables: row i has the pages from i * width on."""
        return (at[:, None] * self.sizes["width"] + np.arange(self.sizes["width"])) % self.sizes["pages"]

    def _shape(self, program: str, field: str) -> tuple[int, ...]:
        sent = self._mine["programs"][program]["sent"]
        return next(tuple(one["shape"]) for one in sent if one["name"] == field)

    def _fields(self, packed: Any) -> dict[str, np.ndarray]:
        """The fields of the tokens that `run` has chosen; every device has all rows."""
        numbers, found, start = np.asarray(packed.addressable_shards[0].data), {}, 0
        for one in self._mine["programs"]["run"]["returned"][0]["fields"]:
            size = prod(one["shape"])
            found[one["name"]] = numbers[:, start : start + size]
            start += size
        return found


def placing(sizes: Sequence[int]) -> Callable[[Described], Any]:
    """A function that gives the sharding of an array on a mesh of these sizes."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    count, devices = prod(sizes), jax.devices()
    if count > len(devices):
        stop(f"the mesh has {count} devices, {len(devices)} are here")
    mesh = Mesh(np.array(devices[:count]).reshape(sizes), AXES)

    def place(one: Described) -> Any:
        if "sharding" not in one:
            return SingleDeviceSharding(devices[0])
        return NamedSharding(mesh, PartitionSpec(*(tuple(cut) or None for cut in one["sharding"])))

    return place


def program(file: Path, taken: Sequence[Described], sent: Sequence[Described], options: dict) -> Any:
    """A jitted program, which must take the arrays that the manifest says."""
    import jax
    import jax.export

    found = jax.export.deserialize(bytearray(file.read_bytes()))
    expected = [(tuple(one["shape"]), dtype(one["dtype"])) for one in taken]
    *arrays, packed = found.in_avals
    numbers = sum(prod(one["shape"]) for one in sent)
    if [(one.shape, one.dtype) for one in arrays] != expected or packed.shape[-1] != numbers:
        stop(f"{file} takes other arrays than manifest.json says")
    return jax.jit(found.call, donate_argnums=1, compiler_options=options or None)


def zeros(one: Described, place: Callable[[Described], Any]) -> Any:
    import jax

    return jax.numpy.zeros(one["shape"], dtype(one["dtype"]), device=place(one))


def read_weights(
    folder: Path, wanted: Sequence[Described], place: Callable[[Described], Any]
) -> tuple[Any, ...]:
    """The weights of an export's folder, each device's part on the device."""
    import jax

    manifest = read_manifest(folder)
    held: dict[str, np.ndarray] = {}
    for name in manifest["weight_files"]:
        file = checked(folder, manifest, name)
        with damage_named(file):
            held |= tensors(file)
    found = []
    for one in wanted:
        array, shape, kind = held.get(one["name"]), tuple(one["shape"]), dtype(one["dtype"])
        if array is None:
            stop(
                f"{folder} has no weights {one['name']}; --weights names the folder of an export that has them"
            )
        if (array.shape, array.dtype) != (shape, kind):
            stop(
                f"{one['name']} is {array.dtype} {array.shape} in {folder}, the programs take {kind} {shape}"
            )
        found.append(jax.make_array_from_callback(shape, place(one), lambda part, array=array: array[part]))
    return tuple(found)


def pack(fields: Sequence[Described], arrays: Mapping[str, Any]) -> np.ndarray:
    """The fields in one array of int32; a field that `arrays` lacks has its `fill`."""
    columns = []
    for one in fields:
        array = np.broadcast_to(arrays.get(one["name"], one.get("fill", 0)), one["shape"])
        kind = np.dtype(np.int32 if one["dtype"] == "bool" else one["dtype"])
        columns.append(np.ascontiguousarray(array.astype(kind)).reshape(-1).view(np.int32))
    return np.concatenate(columns)


def token_ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        stop(f"{text.strip()[:80]!r} is no list of token ids")
    return [int(word) for word in words]


def arguments(manifest: Mapping[str, Any]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, platforms = parser.add_argument, list(manifest["platforms"])
    add(
        "--prompt",
        type=token_ids,
        action="append",
        help="token ids; without any, each line of stdin is a prompt",
    )
    add("--max-tokens", type=int, default=32)
    add("--ends", type=token_ids, default=manifest["ends"], help="token ids that end an answer")
    add("--platform", choices=platforms, default=platforms[0])
    add("--weights", type=Path, help="the folder of an export that has the weights, if it is not this one")
    return parser.parse_args()


def main() -> None:
    folder = Path(__file__).resolve().parent
    manifest = read_manifest(folder)
    given = arguments(manifest)
    os.environ["JAX_PLATFORMS"] = given.platform
    import jax

    if manifest["platforms"][given.platform]["kernels"] == "pallas" and given.platform == "cuda":
        import jax.experimental.mosaic.gpu  # loads the libraries that kernels call
    if given.platform == "cpu":
        devices = prod(manifest["mesh"][axis] for axis in AXES)
        jax.config.update("jax_num_cpu_devices", number(devices, "the number of devices", most=MOST_ON_CPU))
    prompts = given.prompt or [token_ids(line) for line in sys.stdin if line.strip()]
    model = Model(folder, manifest, given.platform, given.weights)
    rows = model.shards * model.sizes["rows"]
    for first in range(0, len(prompts), rows):
        for answer in model.generate(prompts[first : first + rows], given.max_tokens, given.ends):
            print(*answer, sep=",")


if __name__ == "__main__":
    main()
