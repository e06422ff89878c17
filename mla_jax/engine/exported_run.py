"""Runs a model that was exported by mla-jax: reads prompts as token ids, decodes greedily, prints token ids, a line a prompt.

It needs jax, numpy, ml_dtypes and flatbuffers alone, and lies beside manifest.json, which says what is called here, and how:

    python run.py --prompt 0,17,29 --prompt 0,4 --max-tokens 32"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]


def dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


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


def tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a safetensors file, mapped: only what a device takes of them is read."""
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start = 8 + size + entry["data_offsets"][0]
        shape = tuple(entry["shape"])
        yield name, np.memmap(file, dtype(SAFETENSORS[entry["dtype"]]), "r", start, shape)


class Model:
    """The programs for one platform, with weights, an empty pool and an empty table of rows on the devices."""

    def __init__(self, folder: Path, platform: str, weights: Path | None = None):
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.manifest = json.loads((folder / "manifest.json").read_text())
        self.sizes, self.mine = self.manifest["sizes"], self.manifest["platforms"][platform]
        self.shards, axes = self.manifest["mesh"]["data"], self.manifest["mesh"]
        count, devices = prod(axes.values()), jax.devices()
        if count > len(devices):
            sys.exit(f"the mesh has {count} devices, {len(devices)} are here")
        mesh = Mesh(np.array(devices[:count]).reshape(tuple(axes.values())), tuple(axes))
        self._jax = jax
        self._spread = count > 1

        def place(cuts: Sequence[Sequence[str]] | None) -> Any:
            if cuts is None:
                return jax.sharding.SingleDeviceSharding(devices[0])
            return NamedSharding(mesh, PartitionSpec(*(tuple(cut) or None for cut in cuts)))

        self._sent = place([["data"]]) if self._spread else place(None)
        self.weights = self._read(weights or folder, place)
        self.kept = {
            one["name"]: jax.numpy.zeros(one["shape"], dtype(one["dtype"]), device=place(one.get("sharding")))
            for one in self.mine["kept"]
        }
        self._programs = {
            name: self._program(folder / entry["file"]) for name, entry in self.mine["programs"].items()
        }

    def _program(self, file: Path) -> Any:
        program = self._jax.export.deserialize(bytearray(file.read_bytes()))
        options = self.mine["compiler_options"] or None
        return self._jax.jit(program.call, donate_argnums=1, compiler_options=options)

    def _read(self, folder: Path, place: Any) -> tuple[Any, ...]:
        """The weights, each device's part on the device."""
        files = sorted(folder.glob("weights-*.safetensors"))
        found = {name: array for file in files for name, array in tensors(file)}
        arrays = []
        for one in self.manifest["weights"]:
            name = one["name"]
            shape = tuple(one["shape"])
            kind = dtype(one["dtype"])
            array = found.get(name)
            if array is None:
                sys.exit(
                    f"no weights-*.safetensors in {folder} has {name}; --weights names the folder that has them"
                )
            if (array.shape, array.dtype) != (shape, kind):
                sys.exit(
                    f"{name} is {array.dtype} {array.shape} in {folder}, the programs take {kind} {shape}"
                )
            sharding = place(one.get("sharding"))
            arrays.append(
                self._jax.make_array_from_callback(shape, sharding, lambda part, array=array: array[part])
            )
        return tuple(arrays)

    def call(self, name: str, shards: Sequence[Arrays]) -> list[Any]:
        """Calls a program with what is sent to each data shard, and returns what is not kept."""
        entry = self.mine["programs"][name]
        packed = np.stack([self._packed(entry["sent"], arrays) for arrays in shards])
        sent = self._jax.device_put(packed if self._spread else packed[0], self._sent)
        values = self._programs[name](self.weights, [self.kept[one] for one in entry["kept"]], sent)
        self.kept |= dict(zip(entry["kept"], values, strict=False))
        return values[len(entry["kept"]) :]

    def _packed(self, fields: Sequence[dict[str, Any]], arrays: Arrays) -> np.ndarray:
        """The fields in one array of int32; those that `arrays` lacks have what nobody asks for."""
        columns = []
        for one in fields:
            given = arrays.get(one["name"])
            array = np.full(one["shape"], one.get("fill", 0)) if given is None else np.asarray(given)
            kind = np.dtype(np.int32 if one["dtype"] == "bool" else one["dtype"])
            columns.append(np.ascontiguousarray(array.astype(kind)).reshape(-1).view(np.int32))
        return np.concatenate(columns)

    def shape(self, program: str, field: str) -> tuple[int, ...]:
        return next(
            tuple(one["shape"]) for one in self.mine["programs"][program]["sent"] if one["name"] == field
        )

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, ends: Sequence[int]) -> list[list[int]]:
        """Greedy continuations, each of at most so many tokens; as many prompts at a time as there are rows."""
        for prompt in prompts:
            if not prompt or len(prompt) + tokens > self.sizes["context"]:
                sys.exit(
                    f"a prompt of {len(prompt)} and {tokens} new tokens, but a row holds 1 to {self.sizes['context']}"
                )
        at_once, found = self.shards * self.sizes["rows"], []
        for first in range(0, len(prompts), at_once):
            found += self._together(
                [list(prompt) for prompt in prompts[first : first + at_once]], tokens, ends
            )
        return found

    def _together(self, prompts: list[list[int]], tokens: int, ends: Sequence[int]) -> list[list[int]]:
        """Prompt i is in row i // shards of shard i % shards."""
        mine = [dict(enumerate(prompts[shard :: self.shards])) for shard in range(self.shards)]
        self._admit(mine, tokens, ends)
        while any(left for left in mine if any(left.values())):
            self.call("prefill", [self._line(left) for left in mine])
        return self._decoded(len(prompts))

    def _admit(self, mine: list[dict[int, list[int]]], tokens: int, ends: Sequence[int]) -> None:
        (some,), table = self.shape("admit", "at"), self.shape("admit", "entry.ends")
        for first in range(0, self.sizes["rows"], some):
            shards = []
            for prompts in mine:
                rows = [row for row in range(first, first + some) if row in prompts]
                at = np.full(some, self.sizes["rows"])
                end = np.full(table, -1)
                at[: len(rows)], end[:, : len(ends)] = rows, ends
                length = np.zeros(some, np.int32)
                length[: len(rows)] = [len(prompts[row]) for row in rows]
                shards.append(
                    {
                        "at": at,
                        "entry.prompt": length,
                        "entry.limit": np.full(some, tokens),
                        "entry.ends": end,
                    }
                )
            self.call("admit", shards)

    def _line(self, left: dict[int, list[int]]) -> Arrays:
        """The next tokens of some prompts, which are taken from what is left of them."""
        (length,), (some,) = self.shape("prefill", "tokens"), self.shape("prefill", "at")
        at = np.full(some, self.sizes["rows"])
        counts = np.zeros(some, np.int32)
        tokens = np.zeros(length, np.int32)
        unread, used = [row for row in left if left[row]][:some], 0
        for place, row in enumerate(unread):
            piece = left[row][: length - used]
            left[row] = left[row][len(piece) :]
            at[place], counts[place], tokens[used : used + len(piece)] = row, len(piece), piece
            used += len(piece)
        return {"at": at, "tokens": tokens, "counts": counts, "page_table": self._pages(at)}

    def _pages(self, at: np.ndarray) -> np.ndarray:
        """Each row has pages of its own, one row's after the other's."""
        return (at[:, None] * self.sizes["width"] + np.arange(self.sizes["width"])) % self.sizes["pages"]

    def _decoded(self, count: int) -> list[list[int]]:
        rows, found = self.sizes["rows"], [[] for _ in range(count)]
        places = [(i % self.shards) * rows + i // self.shards for i in range(count)]
        at = np.full((self.shards, rows), rows)
        for place in places:
            at[place // rows, place % rows] = place % rows
        sent = [
            {"at": mine, "page_table": self._pages(mine), "steps": np.array(self.sizes["steps"])}
            for mine in at
        ]
        while True:
            chosen = self._fields(self.call("run", sent)[0])
            for answer, place in zip(found, places, strict=True):
                answer += chosen["tokens"][place, : chosen["count"][place, 0]].tolist()
            if not all(chosen["finite"][place, 0] for place in places):
                sys.exit("the logits are not finite")
            if all(chosen["done"][place, 0] for place in places):
                return found

    def _fields(self, packed: Any) -> Arrays:
        """What `run` has chosen, of which every device has all."""
        numbers, found, start = np.asarray(packed.addressable_shards[0].data), {}, 0
        for one in self.mine["programs"]["run"]["returned"][0]["fields"]:
            stop = start + prod(one["shape"])
            found[one["name"]] = numbers[:, start:stop]
            start = stop
        return found


def token_ids(text: str) -> list[int]:
    return [int(word) for word in text.replace(",", " ").split()]


def arguments(manifest: dict[str, Any]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prompt",
        type=token_ids,
        action="append",
        help="token ids; without any, each line of stdin is a prompt",
    )
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument(
        "--ends", type=token_ids, default=manifest["ends"], help="token ids that end an answer"
    )
    parser.add_argument(
        "--platform", choices=list(manifest["platforms"]), default=next(iter(manifest["platforms"]))
    )
    parser.add_argument(
        "--weights", type=Path, help="the folder of weights-*.safetensors, if it is not this one"
    )
    return parser.parse_args()


def main() -> None:
    folder = Path(__file__).resolve().parent
    manifest = json.loads((folder / "manifest.json").read_text())
    given = arguments(manifest)
    os.environ["JAX_PLATFORMS"] = given.platform
    import jax
    import jax.export

    if manifest["platforms"][given.platform]["kernels"] == "pallas" and given.platform == "cuda":
        import jax.experimental.mosaic.gpu  # loads what the kernels call
    if given.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", prod(manifest["mesh"].values()))
    prompts = given.prompt or [token_ids(line) for line in sys.stdin if line.strip()]
    for answer in Model(folder, given.platform, given.weights).generate(
        prompts, given.max_tokens, given.ends
    ):
        print(*answer, sep=",")


if __name__ == "__main__":
    main()
