"""Every bad GGUF file, be there a model in it or not."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from faults import change
from faults.change import Fault, both, copy, link_to_itself, pipe_instead_of, remove, rename

from mla_jax.base.errors import BadFile, Unsupported
from mla_jax.weights.gguf import open_gguf

FILE = "model.gguf"
PARTS = [f"model-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
U8, U32, BOOL, STRING, ARRAY, U64 = 0, 4, 7, 8, 9, 10
Q8_0 = 8
_SHAPES = {"embed.weight": (6, 64), "norm.weight": (7,), "experts.weight": (2, 3, 32), "last.weight": (5,)}  # in no round sizes


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def u32(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


class Parts(NamedTuple):
    """A file in pieces, each to be replaced: counts are those of the lists unless given."""

    keys: list[bytes]
    tensors: list[dict[str, Any]]
    data: bytes
    version: int = 3
    counts: tuple[int, int] | None = None
    padding: bytes | None = None

    def file(self) -> bytes:
        counts = self.counts or (len(self.tensors), len(self.keys))
        header = b"GGUF" + struct.pack("<IQQ", self.version, *counts) + b"".join(self.keys)
        header += b"".join(_entry(**tensor) for tensor in self.tensors)
        return header + (bytes(-len(header) % 32) if self.padding is None else self.padding) + self.data


def _entry(name: str | bytes, dims: list[int], kind: int, offset: int, count: int | None = None) -> bytes:
    form = f"<I{len(dims)}QIQ"
    return text(name) + struct.pack(form, len(dims) if count is None else count, *dims, kind, offset)


def valid() -> Parts:
    """Metadata of several kinds; four tensors, one quantised, each padded to 32 bytes."""
    keys = [key("general.architecture", STRING, text("deepseek2")), u32("general.alignment", 32)]
    keys += [key("flags", ARRAY, array(BOOL, 3, b"\0\1\1")), key("words", ARRAY, array(STRING, 2, text("a") + text("é")))]
    keys += [key("rows", ARRAY, array(ARRAY, 2, array(U8, 2, b"ab") + array(U8, 1, b"c"))), key("yes", BOOL, b"\1")]
    tensors, data = [], b""
    for i, (name, shape) in enumerate(_SHAPES.items()):
        kind, size = (Q8_0, 34 / 32) if i == 0 else (0, 4)
        tensors.append({"name": name, "dims": list(shape[::-1]), "kind": kind, "offset": len(data)})
        content = bytes((i + j) % 251 for j in range(int(np.prod(shape) * size)))
        data += content + bytes(-len(content) % 32)
    return Parts(keys, tensors, data)


def write_valid(root: Path) -> None:
    """The folders that mutations start from: one file; three parts."""
    (root / "single").mkdir(parents=True)
    (root / "single" / FILE).write_bytes(valid().file())
    write_parts(root / "split")


def write_parts(folder: Path, tensors: int = 6, each: int = 2, first: int = 0) -> None:
    """A model in several parts, as the gguf package writes it; its tensors are named from t`first` on, round about."""
    folder.mkdir(parents=True)
    writer = gguf.GGUFWriter(folder / "model", "deepseek2", split_max_tensors=each)
    writer.add_uint32("deepseek2.block_count", 3)
    for i in range(tensors):
        writer.add_tensor(f"t{(i + first) % tensors}", np.arange(8 * (i + 1), dtype=np.float32).reshape(2, -1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(folder: Path) -> None:
    """Every tensor of the model in a folder."""
    opened = open_gguf(folder)
    for name in opened.tensors:
        assert opened.read(name).size
    opened.close()


# ---- ways to change a file


def raw(edit: Callable[[bytes], bytes], file: str = FILE):
    return change.raw(edit, file)


def parts(edit: Callable[[Parts], Parts]):
    """Changes the pieces of the valid file."""
    return raw(lambda _: edit(valid()).file())


def with_keys(*more: bytes):
    return parts(lambda p: p._replace(keys=[*p.keys, *more]))


def without_alignment(*more: bytes):
    return parts(lambda p: p._replace(keys=[p.keys[0], *p.keys[2:], *more]))


def counts(tensors: int | None = None, keys: int | None = None):
    return parts(lambda p: p._replace(counts=(len(p.tensors) if tensors is None else tensors, keys or len(p.keys))))


def tensor(index: int, **changes):
    def edit(p: Parts) -> Parts:
        return p._replace(tensors=[{**t, **changes} if i == index else t for i, t in enumerate(p.tensors)])

    return parts(edit)


def moved(by: int):
    """Moves every tensor but the first, and its data, up."""

    def edit(p: Parts) -> Parts:
        tensors = [{**t, "offset": t["offset"] + (by if i else 0)} for i, t in enumerate(p.tensors)]
        return p._replace(tensors=tensors, data=p.data + bytes(by))

    return parts(edit)


def sparse(size: int, start: bytes):
    return change.sparse(FILE, size, start)


def byte_swapped(data: bytes) -> bytes:
    """The file as a big-endian machine would write the numbers before the first key."""
    return b"GGUF" + struct.pack(">IQQ", *struct.unpack("<IQQ", data[4:24])) + data[24:]


def part_of_other_model(name: str, *sizes: int, into: str | None = None):
    """Puts in a part of a model of other `sizes`."""

    def mutate(folder: Path):
        write_parts(folder.parent / "other", *sizes)
        (folder.parent / "other" / name).replace(folder / (into or name))

    return mutate


def part_of_other_architecture(_: bytes) -> bytes:
    numbers = {"split.no": 1, "split.count": 3, "split.tensors.count": 6}
    keys = [key("general.architecture", STRING, text("llama")), *(u32(name, value) for name, value in numbers.items())]
    tensors = [{"name": name, "dims": [8], "kind": 0, "offset": 32 * i} for i, name in enumerate(("t2", "t3"))]
    return Parts(keys, tensors, bytes(64)).file()


def _nested(deep: int) -> bytes:
    return b"".join(array(ARRAY, 1) for _ in range(deep)) + array(U8, 1, b"a")


_BIG = (1 << 63, (1 << 64) - 1)
_HEAD = b"GGUF" + struct.pack("<I", 3)
_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234567\n"

FAULTS = (
    # row 15: what it says it is
    Fault("empty_file", raw(lambda d: b""), BadFile, (FILE, "cut short", "the file has 0")),
    Fault("three_bytes", raw(lambda d: d[:3]), BadFile, (FILE, "cut short")),
    Fault("other_magic", raw(lambda d: b"GGML" + d[4:]), BadFile, (FILE, "is not a GGUF file", "begins with GGML")),
    Fault("magic_of_escape_codes", raw(lambda d: b"\x1b[2J" + d[4:]), BadFile, ("\\x1b[2J",)),
    Fault("magic_swapped", raw(lambda d: b"FUGG" + d[4:]), BadFile, ("byte-swapped",)),
    Fault("git_lfs_pointer", raw(lambda d: _LFS), BadFile, ("pointer of Git LFS", "git lfs pull")),
    Fault("version_0", parts(lambda p: p._replace(version=0)), BadFile, ("version 0", "does not exist", "known: 2 and 3")),
    Fault("version_1", parts(lambda p: p._replace(version=1)), BadFile, ("version 1", "convert the model again")),
    Fault("version_4", parts(lambda p: p._replace(version=4)), BadFile, ("version 4", "too old for it")),
    Fault("big_endian", raw(byte_swapped), BadFile, (FILE, "big-endian", "little-endian")),
    Fault("a_pipe", pipe_instead_of(FILE), BadFile, (FILE, "not a regular file")),
    Fault("a_link_to_itself", link_to_itself(FILE), BadFile, (FILE,)),
    # row 16: counts beyond the bytes that are left
    *(Fault(f"tensors_of_{n:x}", counts(tensors=n), BadFile, ("cut short", f"{n:,} values")) for n in _BIG),
    *(Fault(f"keys_of_{n:x}", counts(keys=n), BadFile, ("cut short", f"{n:,} values")) for n in _BIG),
    Fault("header_of_24_bytes", raw(lambda d: d[:24]), BadFile, ("cut short",)),
    Fault("header_cut", raw(lambda d: d[:100]), BadFile, (FILE, "cut short", "at byte")),
    Fault("one_tensor_too_many", counts(tensors=5), BadFile, (FILE,)),
    Fault("too_many_tensors", sparse(1 << 30, _HEAD + struct.pack("<QQ", 100_001, 0)), BadFile, ("too many tensors", "100,001")),
    Fault("too_many_keys", sparse(1 << 30, _HEAD + struct.pack("<QQ", 0, 10_001)), BadFile, ("too many metadata keys", "10,001")),
    Fault("key_of_2_to_40_bytes", with_keys(struct.pack("<Q", 1 << 40)), BadFile, ("cut short", f"{1 << 40:,}")),
    Fault("key_of_2_to_64_bytes", with_keys(struct.pack("<Q", (1 << 64) - 1)), BadFile, ("cut short",)),
    Fault("key_too_long", with_keys(u32("k" * 65_536, 1)), BadFile, ("too long", "65,536")),
    Fault("key_of_no_bytes", with_keys(u32("", 1)), BadFile, ("metadata key 6", "has no name")),
    Fault("key_not_utf8", with_keys(key(b"\xff\xfe", U8, b"\0")), BadFile, ("is not UTF-8", "at byte")),
    Fault("text_of_2_to_40_bytes", with_keys(key("k", STRING, struct.pack("<Q", 1 << 40))), BadFile, ("metadata k", "cut short")),
    Fault("text_not_utf8", with_keys(key("k", STRING, text(b"ok\xed\xa0\x80"))), BadFile, ("metadata k", "is not UTF-8")),
    Fault("key_twice", with_keys(u32("yes", 1)), BadFile, ("metadata key 6", "yes", "twice")),
    Fault("value_of_unknown_type", with_keys(key("k", 13, b"")), BadFile, ("metadata k", "unknown type", "type 13")),
    Fault("value_of_type_2_to_32", with_keys(key("k", (1 << 32) - 1, b"")), BadFile, ("metadata k", "unknown type")),
    Fault("truth_of_2", with_keys(key("k", BOOL, b"\2")), BadFile, ("metadata k", "neither 0 nor 1", "found 2")),
    Fault("truths_of_2", with_keys(key("k", ARRAY, array(BOOL, 3, b"\0\1\7"))), BadFile, ("metadata k", "found 7")),
    *(
        Fault(f"array_of_{n:x}_of_type_{kind}", with_keys(key("k", ARRAY, array(kind, n))), BadFile, ("metadata k", "cut short"))
        for n in _BIG
        for kind in (U8, U64, STRING, ARRAY)
    ),
    Fault("array_of_unknown_type", with_keys(key("k", ARRAY, array(99, 1))), BadFile, ("metadata k", "unknown type", "99")),
    Fault(
        "header_over_100_mb",
        sparse(1 << 30, _HEAD + struct.pack("<QQ", 0, 1) + key("k", ARRAY, array(U8, 200_000_000))),
        BadFile,
        ("metadata k", "header too large", "104,857,600"),
    ),
    Fault(
        "text_over_100_mb",
        sparse(1 << 30, _HEAD + struct.pack("<QQ", 0, 1) + key("k", STRING, struct.pack("<Q", 200_000_000))),
        BadFile,
        ("metadata k", "too long", "200,000,000"),
    ),
    Fault(
        "texts_without_end",
        sparse(1 << 30, _HEAD + struct.pack("<QQ", 0, 1) + key("k", ARRAY, array(STRING, 2_000_001))),
        BadFile,
        ("metadata k", "too many items", "2,000,001"),
    ),
    # row 17: arrays in arrays
    Fault("arrays_nested_three_deep", with_keys(key("k", ARRAY, _nested(2))), BadFile, ("metadata k", "nested too deeply")),
    Fault("arrays_nested_10_000_deep", with_keys(key("k", ARRAY, _nested(10_000))), BadFile, ("nested too deeply",)),
    Fault(
        "arrays_of_arrays_without_end",
        sparse(1 << 30, _HEAD + struct.pack("<QQ", 0, 1) + key("k", ARRAY, array(ARRAY, 2_000_001))),
        BadFile,
        ("too many items",),
    ),
    # row 18: alignment
    *(
        Fault(f"alignment_of_{n}", without_alignment(u32("general.alignment", n)), BadFile, ("alignment", "impossible", f"{n:,}"))
        for n in (0, 1, 4, 13, 48, 1 << 21, 1 << 31)
    ),
    Fault("alignment_twice", with_keys(u32("general.alignment", 32)), BadFile, ("general.alignment", "twice")),
    Fault(
        "alignment_of_64_bits",
        without_alignment(key("general.alignment", U64, struct.pack("<Q", 32))),
        BadFile,
        ("general.alignment", "wrong type", "found type 10"),
    ),
    Fault("alignment_is_a_text", without_alignment(key("general.alignment", STRING, text("32"))), BadFile, ("wrong type",)),
    Fault("alignment_other_than_the_datas", without_alignment(u32("general.alignment", 64)), BadFile, ("weight",)),
    # row 19: shapes
    Fault("tensor_of_no_dimensions", tensor(1, dims=[]), BadFile, ("norm.weight", "found 0 dimensions")),
    Fault("tensor_of_five_dimensions", tensor(1, dims=[7, 1, 1, 1, 1]), BadFile, ("norm.weight", "found 5 dimensions")),
    Fault("tensor_of_10_to_6_dimensions", tensor(1, count=10**6), BadFile, ("norm.weight", "1,000,000 dimensions")),
    Fault("dimension_of_0", tensor(1, dims=[0]), BadFile, ("norm.weight", "impossible shape", "[0]")),
    Fault("dimension_of_2_to_63", tensor(1, dims=[1 << 63]), BadFile, ("norm.weight", "impossible shape")),
    Fault("product_wraps_to_0", tensor(1, dims=[1 << 62, 1 << 62, 4]), BadFile, ("norm.weight", "beyond the end of the file")),
    Fault("bytes_wrap_to_28", tensor(1, dims=[(1 << 62) + 7]), BadFile, ("norm.weight", "beyond the end of the file")),
    Fault("shape_too_large", tensor(1, dims=[9]), BadFile, ("experts.weight", "overlaps", "expected")),
    Fault("shape_too_small", tensor(2, dims=[4]), BadFile, ("last.weight", "leaves a hole before it")),
    Fault("last_shape_too_small", tensor(3, dims=[5, 1, 1, 1], offset=0), BadFile, ("overlaps",)),
    Fault("last_shape_too_large", tensor(3, dims=[500]), BadFile, ("last.weight", "beyond the end of the file", "2,000 bytes")),
    # row 20: offsets
    Fault("offset_unaligned", tensor(1, offset=420), BadFile, ("norm.weight", "not aligned", "420", "multiple of 32")),
    Fault("offset_beyond_the_file", tensor(1, offset=1 << 40), BadFile, ("norm.weight", "beyond the end of the file")),
    *(Fault(f"offset_wraps_by_{n}", tensor(1, offset=(1 << 64) - n), BadFile, ("norm.weight",)) for n in (32, 416, 1)),
    Fault("tensors_at_one_place", tensor(1, offset=0), BadFile, ("overlaps the tensor before it",)),
    Fault("hole_between_tensors", moved(32), BadFile, ("norm.weight", "leaves a hole before it")),
    Fault("data_cut_in_half", raw(lambda d: d[: len(d) - 400]), BadFile, ("beyond the end of the file", "stopped early")),
    Fault("last_byte_missing", raw(lambda d: d[:-32]), BadFile, ("last.weight", "beyond the end of the file")),
    Fault("trailing_bytes", raw(lambda d: d + bytes(32)), BadFile, (FILE, "trailing bytes")),
    Fault("trailing_bytes_without_tensors", raw(lambda d: Parts([], [], bytes(64)).file()), BadFile, ("trailing bytes",)),
    # row 21: types
    *(Fault(f"type_{n}", tensor(1, kind=n), Unsupported, ("norm.weight", f"type {n}", "known: F32")) for n in (4, 31, 1000)),
    Fault("type_of_2_to_32", tensor(1, kind=(1 << 32) - 1), Unsupported, ("norm.weight", "4294967295")),
    Fault("row_not_a_multiple_of_the_block", tensor(0, dims=[63, 6]), BadFile, ("embed.weight", "Q8_0", "blocks of 32")),
    Fault("row_of_a_super_block", tensor(0, kind=12), BadFile, ("embed.weight", "Q4_K", "blocks of 256")),
    # names
    Fault("tensor_twice", tensor(1, name="embed.weight"), BadFile, ("embed.weight", "twice")),
    Fault("tensor_of_no_name", tensor(1, name=""), BadFile, ("tensor 1 of 4", "has no name")),
    Fault("tensor_of_a_long_name", tensor(1, name="n" * 513), BadFile, ("tensor 1 of 4", "too long", "513")),
    Fault("tensor_not_utf8", tensor(1, name=b"\xff"), BadFile, ("tensor 1 of 4", "not UTF-8")),
    Fault("tensor_of_escape_codes", tensor(1, name="\x1b[2J", offset=1), BadFile, ("\\x1b[2J", "not aligned")),
    # row 22: parts
    Fault("part_missing", remove(PARTS[1]), BadFile, ("lacks 1 of its 3 parts", PARTS[1]), "split"),
    Fault("parts_missing", remove(*PARTS[1:]), BadFile, ("lacks 2 of its 3 parts", *PARTS[1:]), "split"),
    Fault("first_part_missing", remove(PARTS[0]), BadFile, ("lacks 1 of its 3 parts", PARTS[0]), "split"),
    Fault(
        "parts_swapped",
        rename((PARTS[1], "x"), (PARTS[2], PARTS[1]), ("x", PARTS[2])),
        BadFile,
        (PARTS[1], "split.no is 2, expected 1", PARTS[2]),
        "split",
    ),
    Fault(
        "part_repeated",
        copy(PARTS[1], PARTS[2]),
        BadFile,
        (PARTS[2], "split.no is 1, expected 2"),
        "split",
    ),
    Fault("part_cut", raw(lambda d: d[:-40], PARTS[1]), BadFile, (PARTS[1], "beyond the end of the file"), "split"),
    Fault(
        "part_of_a_model_of_other_length",
        part_of_other_model(PARTS[2], 9, 3),
        BadFile,
        (PARTS[2], "split.tensors.count is 9", "not those of one model"),
        "split",
    ),
    Fault("tensor_in_two_parts", part_of_other_model(PARTS[1], 6, 2, 1), BadFile, ("t4 is in two parts", *PARTS[1:]), "split"),
    Fault(
        "part_of_another_architecture",
        raw(part_of_other_architecture, PARTS[1]),
        BadFile,
        (PARTS[1], "general.architecture is not what it is in", PARTS[0]),
        "split",
    ),
    Fault(
        "parts_of_two_splits",
        part_of_other_model("model-00002-of-00004.gguf", 8, 2, into=PARTS[1]),
        BadFile,
        (PARTS[1], "split.count is 4, expected 3"),
        "split",
    ),
    Fault(
        "one_part_under_another_name",
        both(rename((PARTS[0], FILE)), remove(*PARTS[1:])),
        BadFile,
        (FILE, "split.count is 3, expected 1", "NAME-00001-of-0000N.gguf"),
        "split",
    ),
    Fault(
        "two_models_in_a_folder",
        copy(FILE, "other.gguf"),
        BadFile,
        ("holds 2 GGUF models", FILE, "other.gguf", "name the file"),
    ),
    Fault("no_model_in_a_folder", remove(FILE), BadFile, ("holds no GGUF model",)),
    Fault("part_0", rename((FILE, "m-00000-of-00001.gguf")), BadFile, ("impossible name", "part 0 of 1")),
)
