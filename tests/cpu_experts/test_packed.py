"""Layers saved to a file and mapped from it: the same bits, in no memory of their own; and every file that is refused."""

import contextlib
import hashlib
import os
import re
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from forks import in_a_child
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_layers import fitting, random_batch, random_layer

from cpu_experts import Closed, Experts, Unsupported, layout, packed
from cpu_experts.library import NAME

LAYER, BATCH = random_layer(6, 64, 48), random_batch(12, 64, 6, 2)
MIXED = [("int8", "bf16"), ("fp8_block", "int4_g32"), ("q4_k", "q6_k"), ("q8_0", "q4_k")]
forking = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")


@pytest.fixture
def saved(built, tmp_path):
    """A file, and what the layer in it makes of BATCH."""
    path = tmp_path / "layer.experts"
    with Experts(*LAYER, "int8", threads=2) as layer:
        layer.save(path)
        return path, layer.forward(*BATCH)


# The same layer


@pytest.mark.parametrize(("precision", "down_precision"), [*((each, None) for each in layout.FORMATS), *MIXED])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 70, 33), (6, 130, 260)])
def test_an_opened_layer_is_the_saved_one_bit_for_bit(built, tmp_path, precision, down_precision, sizes):
    experts, model, width = sizes
    (model,), (width,) = fitting(precision, model), fitting(down_precision or precision, width)
    batch = random_batch(20, model, experts, 2)
    with Experts(*random_layer(experts, model, width), precision, down_precision=down_precision) as layer:
        layer.save(tmp_path / "one")
        with Experts.open(tmp_path / "one", verify=True) as opened:
            assert opened.forward(*batch).tobytes() == layer.forward(*batch).tobytes()
            for name in ("experts", "model", "width", "precision", "down_precision", "nbytes"):
                assert getattr(opened, name) == getattr(layer, name)
            opened.save(tmp_path / "two")
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["one", "two"]


def test_options_of_opening_are_those_of_a_layer_packed_here(saved):
    path, _ = saved
    with Experts.open(str(path), 1, isa="portable", max_rows=4) as layer:
        few = layer.forward(*BATCH)
    with Experts(*LAYER, "int8", 1, isa="portable", max_rows=4) as layer:
        assert few.tobytes() == layer.forward(*BATCH).tobytes()
    with pytest.raises(ValueError, match="isa 'neon'"):
        Experts.open(path, isa="neon")
    with pytest.raises(ValueError, match="threads: -1"):
        Experts.open(path, -1)
    with pytest.raises(ValueError, match="max_rows: 0"):
        Experts.open(path, max_rows=0)


def test_the_mapped_weights_are_read_only_and_start_at_huge_pages_of_the_file(saved):
    path, _ = saved
    with Experts.open(path) as layer:
        assert not any(section.flags.writeable for section in layer._packed)
    for section in packed.places((6, 64, 48), ("int8", "int8")):
        assert section.offset % (2 << 20) == 0


def test_a_file_of_holes_takes_little_room(saved):
    path, _ = saved
    assert path.stat().st_size > 4 << 20
    assert path.stat().st_blocks * 512 < 1 << 20


def test_a_mapped_layer_outlives_its_files_name_and_its_successor(saved):
    path, expected = saved
    layer = Experts.open(path)
    with Experts(*random_layer(6, 64, 48, seed=1), "int8") as other:
        other.save(path)
        with Experts.open(path) as second:
            assert (second.forward(*BATCH) == other.forward(*BATCH)).all()
    assert (layer.forward(*BATCH) == expected).all()
    layer.save(path)
    path.unlink()
    assert (layer.forward(*BATCH) == expected).all()
    layer.close()


def test_a_closed_layer_is_neither_saved_nor_mapped_any_longer(saved, tmp_path):
    path, _ = saved
    with Experts.open(path) as layer:
        assert str(path) in Path("/proc/self/maps").read_text()
    assert str(path) not in Path("/proc/self/maps").read_text()
    with pytest.raises(Closed):
        layer.save(tmp_path / "never")
    with pytest.raises(Closed):
        layer.forward(*BATCH)


@forking
def test_a_forked_child_uses_a_mapped_layer_and_opens_it_again(saved):
    path, expected = saved
    layer = Experts.open(path, threads=2)

    def act() -> bool:
        same = (layer.forward(*BATCH) == expected).all()
        layer.close()
        with Experts.open(path, threads=2, verify=True) as again:
            return same and (again.forward(*BATCH) == expected).all()

    assert in_a_child(act) == 0
    assert (layer.forward(*BATCH) == expected).all()
    layer.close()


MEMORY = """
import sys
import numpy as np
from cpu_experts import Experts
def held(kind):  # page by page: what /proc/self/status says may lack pages that each core counts for itself
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/smaps_rollup") if line.startswith(kind))
before = held("Anonymous:")
layer = Experts.open(sys.argv[1], 1, max_rows=8)
opened = held("Anonymous:") - before
ids = np.arange(8, dtype=np.int32)[:, None]
layer.forward(np.ones((8, 1024), np.float32), ids, np.ones((8, 1), np.float32))
anonymous = held("Anonymous:")
print(layer.nbytes, opened, anonymous - before, held("Rss:") - anonymous)  # the rest is of files
"""


def in_another_process(builds, script: str, *arguments: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"CPU_EXPERTS_LIBRARY": str(builds() / NAME), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True)


def test_opening_takes_no_memory_for_the_weights_and_forward_only_the_files(built, builds, tmp_path):
    parts = [(np.full(shape, 0x3C00, np.uint16),) for shape in [(8, 1024, 1024)] * 3]
    with Experts(*parts, "bf16") as layer:
        layer.save(tmp_path / "layer")
    done = in_another_process(builds, MEMORY, tmp_path / "layer")
    nbytes, opened, used, file = map(int, done.stdout.split())
    assert nbytes == 8 * 3 * 2 << 20
    assert opened < nbytes / 8
    assert used < nbytes / 4
    assert file > nbytes * 0.9


# Files that are refused


def header(path: Path) -> bytearray:
    return bytearray(path.read_bytes()[: packed.HEADER_BYTES])


def put(path: Path, head: bytes, signed: bool = True) -> None:
    """In place of the file's header, with a checksum that fits it."""
    if signed:
        head = head[:-4] + struct.pack("<I", zlib.crc32(head[:-4]))
    with open(path, "r+b") as file:
        file.write(head)


FIELDS = {  # where each is in the header
    "magic": (0, "8s"),
    "version": (8, "I"),
    "gate_up": (12, "16s"),
    "down": (28, "16s"),
    "X": (44, "I"),
    "D": (48, "I"),
    "F": (52, "I"),
    "gate_up_offset": (56, "Q"),
    "gate_up_bytes": (64, "Q"),
    "gate_up_checksum": (72, "I"),
    "down_offset": (76, "Q"),
    "down_bytes": (84, "Q"),
    "down_checksum": (92, "I"),
}


def change(path: Path, fields: dict[str, int | bytes]) -> None:
    """Other values in the header, whose checksum is right again."""
    head = header(path)
    for name, value in fields.items():
        offset, kind = FIELDS[name]
        struct.pack_into("<" + kind, head, offset, value)
    put(path, head)


def refused(path: Path, words: str, error: type[Exception] = ValueError, **options: bool) -> None:
    with pytest.raises(error, match=re.escape(words)) as caught:
        Experts.open(path, **options)
    assert str(path) in str(caught.value)


@pytest.fixture
def unmapped(saved, monkeypatch):
    """The file, with an error of ours should anything be mapped."""

    def mapped(*_, **__):
        raise AssertionError("mapped")

    monkeypatch.setattr(packed.mmap, "mmap", mapped)
    return saved[0]


MOST = {"X": 2**16, "D": 2**16, "F": 2**16, "gate_up_bytes": 563018672898048}
BAD = {
    "another magic": ({"magic": b"\x93NUMPY\1\0"}, "no file of packed experts, as Experts.save makes"),
    "an unknown format": ({"gate_up": b"int5"}, "precision 'int5', must be one of bf16, int8,"),
    "a format that is no text": ({"down": b"\xff\0int8"}, r"precision '\\xff\x00int8', must be one of"),
    "no experts": ({"X": 0}, "(0, 64, 48) experts, model and width, each must be 1 to 65536"),
    "too many experts": ({"X": 2**16 + 1}, "(65537, 64, 48) experts, model and width, each must be 1 to 65536"),
    "absurdly wide": ({"F": 2**32 - 1}, "(6, 64, 4294967295) experts, model and width, each must be"),
    "one expert more": ({"X": 7}, "gate and up: 41,472 bytes at 2,097,152, must be 48,384 at 2,097,152"),
    "a larger model": ({"D": 128}, "gate and up: 41,472 bytes at 2,097,152, must be 78,336 at 2,097,152"),
    "another format": ({"down": b"bf16"}, "down: 27,648 bytes at 4,194,304, must be 49,152 at 4,194,304"),
    "blocks that the model does not fill": ({"gate_up": b"q4_k"}, "q4_k: 64 inputs, must be a multiple of 256"),
    "gate and up elsewhere": ({"gate_up_offset": 4096}, "gate and up: 41,472 bytes at 4,096, must be 41,472 at 2,097,152"),
    "down far out": ({"down_offset": 2**64 - 1}, "down: 27,648 bytes at 18,446,744,073,709,551,615, must be 27,648"),
    "down longer": ({"down_bytes": 2**63}, "down: 9,223,372,036,854,775,808 bytes at 4,194,304, must be 27,648"),
    "more than any disk has": (
        MOST | {"down_offset": 563018674995200, "down_bytes": 281509336449024},
        "4,221,952 bytes, must be 844,528,011,444,224: cut short; save the layer again",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_header_that_does_not_agree_with_itself_is_refused(unmapped, name):
    fields, words = BAD[name]
    change(unmapped, fields)
    refused(unmapped, words)


def test_another_version_is_unsupported_whatever_follows(unmapped):
    change(unmapped, {"version": packed.VERSION + 1, "gate_up": b"\xff" * 16})
    refused(unmapped, "version 2 of packed experts, expected 1: save the layer again", Unsupported)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 bytes, but a header has 100: cut short"),
        (99, "99 bytes, but a header has 100: cut short"),
        (100, "100 bytes, must be 4,221,952: cut short; save the layer again"),
        (4_221_951, "4,221,951 bytes, must be 4,221,952: cut short"),
        (4_221_953, "4,221,953 bytes, must be 4,221,952: something was added"),
        (1 << 40, "1,099,511,627,776 bytes, must be 4,221,952: something was added"),
    ],
)
def test_a_file_of_another_length_is_refused(unmapped, size, words):
    os.truncate(unmapped, size)
    refused(unmapped, words)


def test_what_is_no_regular_file_is_refused_and_not_waited_for(unmapped, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        refused(path, "not a regular file")
    with pytest.raises(FileNotFoundError, match="nothing"):
        Experts.open(tmp_path / "nothing")


def test_any_bit_of_the_header_matters(unmapped):
    head = header(unmapped)
    for i in range(8 * len(head)):
        changed = head.copy()
        changed[i // 8] ^= 1 << i % 8
        put(unmapped, changed, signed=False)
        with pytest.raises((ValueError, Unsupported), match=re.escape(str(unmapped))):
            Experts.open(unmapped)


NUMBERS = [0, 1, 5, 6, 7, 31, 33, 48, 63, 64, 65, 256, 4096, 2**16, 2**16 + 1, 2**31, 2**32 - 1]
WORDS = [name.encode() for name in layout.FORMATS] + [b"", b"\0int8", b"int8 ", b"\xff" * 16]
values = {name: st.sampled_from(WORDS if kind == "16s" else NUMBERS) for name, (_, kind) in FIELDS.items() if kind != "8s"}


@pytest.mark.deep
@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(list(values)).flatmap(lambda name: st.tuples(st.just(name), values[name])), max_size=3).map(dict))
def test_a_header_of_anything_is_refused_or_computes(saved, fields):
    """Its checksum is right; some sizes, of as many panels, are as good as others."""
    path, _ = saved
    original = header(path)
    change(path, fields)
    with contextlib.suppress(ValueError, Unsupported), Experts.open(path, threads=1) as layer:
        out = layer.forward(*random_batch(3, layer.model, layer.experts, 2))
        assert out.shape == (3, layer.model)
    put(path, original)


@pytest.mark.parametrize(("at", "where"), [(2 << 20, "gate and up"), ((4 << 20) - 1, None), (4 << 20, "down"), (-1, "down")])
def test_damaged_weights_are_found_when_asked_for(saved, at, where):
    path, _ = saved
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    with Experts.open(path) as layer:
        assert layer.forward(*BATCH).shape == (12, 64)
    if where:
        refused(path, f"{where}: checksum ", verify=True)
    else:
        Experts.open(path, verify=True).close()  # between the sections


@pytest.mark.parametrize("precision", layout.FORMATS)
def test_weights_of_any_bytes_compute_something(built, tmp_path, precision):
    model, width = fitting(precision, 64, 48)
    with Experts(*random_layer(3, model, width), precision) as layer:
        layer.save(tmp_path / "layer")
    for section in packed.places((3, model, width), (precision, precision)):
        with open(tmp_path / "layer", "r+b") as file:
            file.seek(section.offset)
            file.write(np.random.default_rng(0).bytes(section.end - section.offset))
    with Experts.open(tmp_path / "layer") as layer:
        for tokens in (1, 40):
            assert layer.forward(*random_batch(tokens, model, 3, 2)).shape == (tokens, model)


# Saving that comes to no end


def test_a_full_disk_leaves_what_was_there(saved, monkeypatch):
    path, expected = saved
    whole, turns = packed._write_all, iter([None, OSError(28, os.strerror(28))])

    def full(*written):
        if error := next(turns):
            raise error
        whole(*written)

    monkeypatch.setattr(packed, "_write_all", full)
    words = r"No space left on device: 122,880 bytes of packed weights were not saved: .*layer\.experts"
    with Experts(*LAYER) as layer, pytest.raises(OSError, match=words):
        layer.save(path)
    assert list(path.parent.iterdir()) == [path]
    with Experts.open(path, verify=True) as layer:
        assert (layer.forward(*BATCH) == expected).all()


def test_a_limit_met_amid_a_write_leaves_nothing(built, tmp_path):
    """As a full disk does: first fewer bytes are written than given, then none."""
    resource = pytest.importorskip("resource")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Experts(*LAYER) as layer:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((4 << 20) + 1000, old[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                layer.save(tmp_path / "layer")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
import numpy as np
from cpu_experts import Experts, packed
module, name, turn = {"_write_all": packed, "fsync": os}[sys.argv[2]], sys.argv[2], int(sys.argv[3])
whole, turns = getattr(module, name), iter(range(100))
def killed(*given):
    if next(turns) == turn:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*given)
setattr(module, name, killed)
Experts(*[np.ones((2, 32, 32), np.float32)] * 3).save(sys.argv[1])
"""


@pytest.mark.parametrize(("function", "turn"), [("_write_all", 0), ("_write_all", 1), ("_write_all", 2), ("fsync", 0)])
def test_killed_while_saving_leaves_nothing_under_the_name(builds, tmp_path, function, turn):
    path = tmp_path / "layer"
    assert in_another_process(builds, KILLED, path, function, turn).returncode == -signal.SIGKILL
    assert [each.name[:6] + each.suffix for each in tmp_path.iterdir()] == ["layer..partial"]
    assert in_another_process(builds, KILLED, path, function, 50).returncode == 0
    assert path.is_file()


@forking
def test_a_folder_that_may_not_be_written_is_an_error_and_stays_as_it_is(built, tmp_path):
    tmp_path.chmod(0o555)
    layer = Experts(*LAYER)

    def act() -> bool:
        os.chdir(tmp_path)
        if os.geteuid() == 0:  # whom no folder refuses
            os.setuid(65534)
        with pytest.raises(PermissionError, match="were not saved: 'layer'"):
            layer.save("layer")
        return True

    assert in_a_child(act) == 0
    assert not list(tmp_path.iterdir())
    tmp_path.chmod(0o755)
    layer.close()


def test_a_folder_that_is_not_there_and_a_name_that_is_a_folders(built, tmp_path):
    (tmp_path / "folder").mkdir()
    with Experts(*LAYER) as layer:
        with pytest.raises(FileNotFoundError, match="were not saved"):
            layer.save(tmp_path / "nowhere" / "layer")
        with pytest.raises(IsADirectoryError, match="were not saved"):
            layer.save(tmp_path / "folder")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


# The version


def filled(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The same numbers everywhere and for ever."""
    count = np.arange(int(np.prod(shape)), dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(20)
    return (count % 255 if dtype == "uint8" else count % 251 - 125.0 if dtype == "int8" else count).astype(dtype).reshape(shape)


DIGESTS = {
    "bf16": "b6f68ee3c0c23f7b",
    "int8": "d1b4ce7c5060bbd3",
    "int4_g32": "072663590c939cb4",
    "int4_g128": "37881f42b0cc0ddc",
    "fp8_block": "c22ea01be38972cb",
    "q8_0": "4def5033e531df59",
    "q4_k": "da5f9fe55cbfd7cd",
    "q6_k": "81e1e3df3d4819da",
}


@pytest.mark.parametrize("precision", layout.FORMATS)
def test_files_of_this_version_hold_what_they_always_did(built, tmp_path, precision):
    """Should this fail, files that are on disks would be taken for others: raise packed.VERSION with the numbers here."""
    experts, model, width = 2, *fitting(precision, 200, 72)
    matrices = (width, model), (width, model), (model, width)
    parts = [tuple(filled(d, (experts, *s)) for d, s in layout.part_shapes(precision, *matrix)) for matrix in matrices]
    with Experts(*parts, precision) as layer:
        layer.save(tmp_path / "layer")
    assert packed.VERSION == 1
    assert hashlib.sha256((tmp_path / "layer").read_bytes()).hexdigest()[:16] == DIGESTS[precision]
