"""Stored tensors come back bit for bit or not at all, whatever happens between."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from mla_jax.base import qtensor
from mla_jax.base.errors import BadFile, DoesNotFit, Unsupported
from mla_jax.weights import orbax_chunks
from mla_jax.weights.orbax_store import MANIFEST, NewTensor, Writer, is_store, open_store
from mla_jax.weights.safetensors import STORED_DTYPES

# a failed read leaves futures of Orbax behind, which find its event loop closed
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SHAPES = {"fp8_block_16x24": (3, 40, 60), "int4_g32": (5, 70), "Q4_K": (2, 3, 512), "int8": (7, 9)}


def random(dtype, shape, seed=0) -> np.ndarray:
    """Random bits, NaNs among them."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    return np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 256, count, np.uint8).view(dtype).reshape(shape)


def tensor(format, shape, seed=0) -> NewTensor:
    if format in STORED_DTYPES:
        return NewTensor(format, shape, (random(STORED_DTYPES[format], shape, seed),))
    return NewTensor(format, shape, tuple(random(part.dtype, part.shape, seed) for part in qtensor.abstract(format, shape).parts))


def stored(folder, tensors, **options):
    writer = Writer(folder, {}, **options)
    writer.save(tensors)
    writer.finalize()
    return open_store(folder)


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        a = np.asarray(a)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()


def leaf(folder, name):
    """Where Orbax keeps a chunk of the first step."""
    return folder / "weights" / "00000" / "state" / name


def chunk_file(folder, name):
    (file,) = (path for path in (leaf(folder, name) / "c").rglob("*") if path.is_file())
    return file


def edit(folder, change):
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def script(body, *arguments, devices=1):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    code = "import os, sys, signal\nimport numpy as np\nfrom pathlib import Path\n" + textwrap.dedent(body)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("format", STORED_DTYPES)
def test_a_plain_tensor_comes_back_bit_for_bit(tmp_path, format):
    tensors = {"x": tensor(format, (3, 5)), "scalar": tensor(format, ())}
    store = stored(tmp_path / "out", tensors)
    for name, expected in tensors.items():
        assert (store.tensors[name].format, store.tensors[name].shape) == (expected.format, expected.shape)
        assert store.tensors[name].nbytes == expected.parts[0].nbytes
        assert_equal(store.read(name), expected.parts)


@pytest.mark.parametrize("format", SHAPES)
def test_the_parts_of_a_quantised_tensor_come_back_bit_for_bit(tmp_path, format):
    expected = tensor(format, SHAPES[format])
    store = stored(tmp_path / "out", {"x": expected})
    assert_equal(store.read("x"), expected.parts)
    assert_equal(store.read("x", 1), [part[1] for part in expected.parts])
    with pytest.raises(IndexError, match="no entry 9"):
        store.read("x", 9)


@pytest.mark.parametrize("shards", [(1, 1), (2, 1), (1, 5), (4, 3), (7, 10)])
def test_a_tensor_in_any_chunks_comes_back(tmp_path, monkeypatch, shards):
    monkeypatch.setattr(orbax_chunks, "MAX_CHUNK", 64)
    monkeypatch.setattr(orbax_chunks, "BATCH", 100)
    expected = tensor("F32", (7, 10))
    store = stored(
        tmp_path / "out", {"x": expected, "t": NewTensor("F32", (10, 7), (expected.parts[0].T,))}, shards=lambda *_: shards
    )
    assert_equal(store.read("x"), expected.parts)
    assert_equal(store.read("t"), [np.ascontiguousarray(expected.parts[0].T)])
    assert_equal(store.read("x", 5), [expected.parts[0][5]])


def test_rows_that_no_device_has_for_itself_are_cut_to_chunks_of_a_size_quick_to_write(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_chunks, "MAX_CHUNK", 100)
    tensors = {"x": tensor("U8", (10, 30)), "wide": tensor("U8", (2, 300))}
    store = stored(tmp_path / "out", tensors, shards=lambda name, part, shape: (1, 2) if name == "wide" else (1, 1))
    assert store.tensors["x"].parts[0].chunk == (3, 30)
    assert store.tensors["wide"].parts[0].chunk == (1, 150)


def test_the_folder_appears_whole_with_the_files_put_beside_the_weights(tmp_path):
    writer = Writer(tmp_path / "out", {"source": "a", "config": {"layers": 2}})
    writer.save({"a": tensor("F32", (4,))})
    writer.save({"b": tensor("F32", (4,))})
    (writer.partial / "config.json").write_text("{}")
    assert not (tmp_path / "out").exists()
    writer.finalize()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", MANIFEST, "weights"]
    assert open_store(tmp_path / "out").metadata == {"source": "a", "config": {"layers": 2}}
    assert sorted(open_store(tmp_path / "out").tensors) == ["a", "b"]


def test_an_unfinished_folder_is_recognised_and_refused(tmp_path):
    assert not is_store(tmp_path)
    writer = Writer(tmp_path / "out", {})
    writer.save({"a": tensor("F32", (4,))})
    assert is_store(writer.partial)
    with pytest.raises(BadFile, match="is not complete"):
        open_store(writer.partial)


def test_a_folder_that_exists_is_not_written(tmp_path):
    writer = Writer(tmp_path / "out", {})
    (tmp_path / "out").mkdir()
    with pytest.raises(BadFile, match="exists already"):
        Writer(tmp_path / "out", {})
    with pytest.raises(BadFile, match="exists already"):
        writer.finalize()


def test_to_go_on_from_another_source_is_refused_and_the_difference_named(tmp_path):
    Writer(tmp_path / "out", {"source": "a", "format": "int8"}).save({"a": tensor("F32", (4,))})
    with pytest.raises(BadFile, match="what differs: source"):
        Writer(tmp_path / "out", {"source": "b", "format": "int8"})


def test_a_tensor_is_stored_once(tmp_path):
    writer = Writer(tmp_path / "out", {})
    writer.save({"a": tensor("F32", (4,))})
    with pytest.raises(BadFile, match="holds these already"):
        writer.save({"a": tensor("F32", (4,))})


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "a\nb", "x" * 201])
def test_no_name_leads_out_of_the_folder(tmp_path, name):
    with pytest.raises(BadFile, match="cannot name a tensor"):
        Writer(tmp_path / "out", {}).save({name: tensor("F32", (4,))})
    stored(tmp_path / "out", {"a": tensor("F32", (4,))})
    edit(tmp_path / "out", lambda manifest: manifest["tensors"].update({name: manifest["tensors"]["a"]}))
    with pytest.raises(BadFile, match="cannot name a tensor"):
        open_store(tmp_path / "out")


def test_parts_that_are_not_what_their_format_asks_for_are_not_written(tmp_path):
    writer = Writer(tmp_path / "out", {})
    for wrong in (
        NewTensor("F32", (4,), (np.zeros(4, np.float64),)),
        NewTensor("F32", (4,), (np.zeros(4, ">f4"),)),
        NewTensor("int8", (4, 4), (np.zeros((4, 4), np.int8),)),
    ):
        with pytest.raises(BadFile, match="x is not "):
            writer.save({"x": wrong})
    with pytest.raises(Unsupported, match="an empty tensor cannot be stored"):
        writer.save({"x": tensor("F32", (0, 3))})
    with pytest.raises(Unsupported, match="no quantised format"):
        writer.save({"x": NewTensor("Q9", (4,), (np.zeros(4),))})


# killed, full, damaged

STEPS = """
    import threading, time
    from mla_jax.weights.orbax_store import NewTensor, Writer
    writer, moment = Writer(Path(sys.argv[1]), {"source": "s"}), sys.argv[2]
    kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    def late():
        if moment == "within":
            while not any((writer.partial / "weights").glob("00001*")):
                pass
        else:
            time.sleep(float(moment))
        kill()

    print(sorted(writer.tensors))
    for step in range(3):
        values = {f"{step}.{i}": np.full(1 << 20, step * 10 + i, np.uint8) for i in range(4)}
        if values.keys() <= writer.tensors.keys():
            continue
        if step == 1 and moment == "between":
            kill()
        if step == 1 and moment == "recording":
            writer._record = kill
        thread = threading.Thread(target=late, daemon=True)
        if step == 1 and moment in ("within", "0.008"):
            thread.start()
        writer.save({name: NewTensor("U8", value.shape, (value,)) for name, value in values.items()})
        if thread.is_alive():  # it comes late; the step after it would be the last
            thread.join()
    if moment == "renaming":
        os.rename = kill
    writer.finalize()
"""


@pytest.mark.deep
@pytest.mark.parametrize("moment", ["between", "within", "0.008", "recording", "renaming"])
def test_after_a_kill_the_writing_goes_on(tmp_path, moment):
    """The number is seconds into the second step; on busy cores such a kill may come right after it."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    first = script(STEPS, out, moment)
    assert first.returncode == -signal.SIGKILL, first.stderr
    assert not out.exists()
    if moment != "renaming":  # when all is there already
        with pytest.raises(BadFile, match="is not complete"):
            open_store(partial)
    second = script(STEPS, out, "never")
    assert second.returncode == 0, second.stderr
    assert "0.3" in second.stdout  # what was safe is not written again
    assert not partial.exists()
    assert [path.name for path in sorted((out / "weights").iterdir())] == ["00000", "00001", "00002"]
    store = open_store(out)
    for step in range(3):
        for i in range(4):
            assert_equal(store.read(f"{step}.{i}"), [np.full(1 << 20, step * 10 + i, np.uint8)])


def test_a_full_disk_says_how_to_go_on_and_keeps_what_was_written(tmp_path):
    ran = script(
        """
        import resource
        from mla_jax.base.errors import DoesNotFit
        from mla_jax.weights.orbax_store import NewTensor, Writer, open_store
        out, tensor = Path(sys.argv[1]), lambda size: NewTensor("U8", (size,), (np.ones(size, np.uint8),))
        writer = Writer(out, {})
        writer.save({"a": tensor(1000)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))
        try:
            writer.save({"b": tensor(2 << 20)})
        except DoesNotFit as e:
            print(e)
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        writer.save({"b": tensor(2 << 20)})
        writer.finalize()
        print(sorted(open_store(out).tensors))
        """,
        tmp_path / "out",
    )
    assert "the disk is full" in ran.stdout, ran.stderr
    assert "the 1 tensors before are kept" in ran.stdout
    assert "['a', 'b']" in ran.stdout
    assert "absl" not in ran.stderr  # neither Orbax's tracebacks nor its warnings


@pytest.mark.deep
def test_to_write_takes_no_memory_and_to_read_little_more_than_the_tensor(tmp_path):
    ran = script(
        """
        from mla_jax.weights.orbax_store import NewTensor, Writer, open_store
        def peak():
            (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
            return int(line.split()[1]) >> 10
        out, value = Path(sys.argv[1]), np.random.default_rng(0).integers(0, 256, (400, 1 << 20), np.uint8)
        writer = Writer(out, {})
        writer.save({"warm": NewTensor("U8", (1,), (np.ones(1, np.uint8),))})
        before = peak()
        writer.save({"x": NewTensor("U8", value.shape, (value,))})
        writer.finalize()
        print(peak() - before)
        (found,) = open_store(out).read("x")
        print(peak() - before)
        assert np.array_equal(found, value)
        """,
        tmp_path / "out",
    )
    assert ran.returncode == 0, ran.stderr
    written, read = map(int, ran.stdout.split())
    assert written < 40  # MB of 400
    assert read < 400 + 2 * 256 + 40


@pytest.mark.parametrize(("code", "error"), [(errno.ENOSPC, DoesNotFit), (errno.EDQUOT, DoesNotFit), (errno.EROFS, BadFile)])
def test_what_the_system_refuses_is_said(tmp_path, monkeypatch, code, error):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    writer = Writer(tmp_path / "out", {})
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(error, match="cannot be written"):
        writer.save({"a": tensor("F32", (4,))})
    assert writer.tensors == {}


def test_a_flipped_byte_is_found_and_its_tensor_and_folder_are_named(tmp_path):
    tensors = {"a": tensor("fp8_block", (130, 140)), "b": tensor("F32", (4,))}
    store = stored(tmp_path / "out", tensors)
    with open(chunk_file(tmp_path / "out", "a.0.0"), "r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(BadFile, match=r"(?s)a is damaged.*a\.0\.0.*weights/00000"):
        store.read("a")
    assert_equal(store.read("b"), tensors["b"].parts)


@pytest.mark.deep
def test_a_flipped_byte_in_files_of_orbax_itself_is_one_error_or_changes_nothing(tmp_path):
    stored(tmp_path / "out", {f"x{i}": tensor("F32", (5,), seed=i) for i in range(4)})
    ran = script(
        """
        from mla_jax.base.errors import BadFile
        from mla_jax.weights.orbax_store import open_store
        out = Path(sys.argv[1])
        step = out / "weights" / "00000"
        def read():
            store = open_store(out)
            return [store.read(name)[0].tobytes() for name in store.tensors]
        expected = read()
        for name in ("_CHECKPOINT_METADATA", "commit_success.txt", "state/_METADATA", "state/x0.0.0/zarr.json"):
            file, refused, same = step / name, 0, 0
            data = file.read_bytes()
            for at in range(0, len(data), 5):
                file.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 7]) + data[at + 1 :])
                try:
                    assert read() == expected, (name, at)
                    same += 1
                except BadFile as e:
                    assert f"in {step}" in str(e), e
                    assert len(str(e).splitlines()) == 4, e
                    refused += 1
            file.write_bytes(data)
            print(refused > same)
        """,
        tmp_path / "out",
    )
    assert (ran.returncode, ran.stderr) == (0, "")  # neither Orbax's tracebacks nor its warnings
    assert ran.stdout.split() == ["False", "False", "True", "True"]  # the first two are not needed to read


@pytest.mark.parametrize("damage", ["delete", "cut", "empty", "delete description", "cut description"])
def test_a_chunk_that_is_missing_or_cut_short_is_never_zeros(tmp_path, damage):
    store = stored(tmp_path / "out", {"a": tensor("F32", (100, 3)), "b": tensor("F32", (4,))})
    file = leaf(tmp_path / "out", "a.0.0") / "zarr.json" if "description" in damage else chunk_file(tmp_path / "out", "a.0.0")
    file.unlink() if "delete" in damage else os.truncate(file, 0 if damage == "empty" else 100)
    with pytest.raises(BadFile, match="a cannot be read") as caught:
        store.read("a")
    assert caught.value.__cause__ is not None
    if "description" not in damage:
        store.read("b")


def test_an_array_of_another_dtype_or_shape_than_the_manifest_says_is_refused(tmp_path):
    stored(tmp_path / "out", {"a": tensor("F32", (4, 6))})
    description = leaf(tmp_path / "out", "a.0.0") / "zarr.json"
    original = description.read_text()
    for old, new in (('"float32"', '"int32"'), ("4,6", "4,7"), ("[4,6]", "[1000000000000,6]")):
        description.write_text(original.replace(old, new))
        with pytest.raises(BadFile, match="a does not match the manifest"):
            open_store(tmp_path / "out").read("a")


def test_a_step_that_is_missing_is_said_at_once(tmp_path):
    stored(tmp_path / "out", {"a": tensor("F32", (4,))})
    (tmp_path / "out" / "weights" / "00000").rename(tmp_path / "elsewhere")
    with pytest.raises(BadFile, match="00000 is missing"):
        open_store(tmp_path / "out")


def test_a_newer_version_is_refused_and_both_are_named(tmp_path):
    stored(tmp_path / "out", {"a": tensor("F32", (4,))})
    edit(tmp_path / "out", lambda manifest: manifest.update(version=7))
    with pytest.raises(BadFile, match=r"(?s)version 7.*up to 1"):
        open_store(tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [4, -6]},
        {"shape": [4]},
        {"shape": [2**70, 6]},
        {"shape": "46"},
        {"format": "F64"},
        {"step": -1},
        {"step": "0"},
        {"parts": []},
        {"parts": 3},
        {"parts": [{}]},
        {"parts": [{"dtype": "float32", "shape": [4, 6], "chunk": [2, 6], "checksums": ["0" * 16]}]},
        {"parts": [{"dtype": "float32", "shape": [4, 6], "chunk": [0, 6], "checksums": []}]},
        {"parts": [{"dtype": "float32", "shape": [4, 6], "chunk": [4], "checksums": ["0" * 16]}]},
        {"parts": [{"dtype": "int32", "shape": [4, 6], "chunk": [4, 6], "checksums": ["0" * 16]}]},
    ],
    ids=str,
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path, change):
    stored(tmp_path / "out", {"a": tensor("F32", (4, 6))})
    edit(tmp_path / "out", lambda manifest: manifest["tensors"]["a"].update(change))
    with pytest.raises(BadFile, match="invalid entry"):
        open_store(tmp_path / "out")


@pytest.mark.parametrize("text", ["", "{}", "[]", "{", '{"kind": "mla-jax weights", "version": 1}'])
def test_what_is_no_manifest_is_refused(tmp_path, text):
    stored(tmp_path / "out", {"a": tensor("F32", (4, 6))})
    (tmp_path / "out" / MANIFEST).write_text(text)
    with pytest.raises(BadFile):
        open_store(tmp_path / "out")


# on devices


def test_a_dtype_that_jax_would_narrow_is_refused(tmp_path):
    store = stored(tmp_path / "out", {"a": tensor("F64", (4,))})
    with pytest.raises(Unsupported, match="jax_enable_x64"):
        store.restore("a", (SingleDeviceSharding(jax.devices()[0]),))


def test_a_device_gets_the_parts_of_a_quantised_tensor(tmp_path):
    expected = tensor("fp8_block", (2, 130, 140))
    store = stored(tmp_path / "out", {"a": expected})
    one = SingleDeviceSharding(jax.devices()[0])
    parts = store.restore("a", (one, one))
    assert parts[0].dtype == ml_dtypes.float8_e4m3fn
    assert_equal(parts, expected.parts)


def test_threads_may_read_at_once(tmp_path):
    tensors = {f"x{i}": tensor("F32", (50, 40), seed=i) for i in range(12)}
    store = stored(tmp_path / "out", tensors)
    with ThreadPoolExecutor(4) as pool:
        for found, expected in zip(pool.map(store.read, tensors), tensors.values(), strict=True):
            assert_equal(found, expected.parts)


@pytest.mark.deep
@pytest.mark.slow
def test_every_mesh_gets_equal_values(tmp_path):
    expected = tensor("BF16", (16, 24))
    for name, shards in {"whole": (1, 1), "rows": (4, 1), "columns": (1, 8), "both": (8, 3)}.items():
        stored(tmp_path / name, {"x": expected}, shards=lambda *_, shards=shards: shards)
    np.save(tmp_path / "expected.npy", expected.parts[0].view(np.uint16))
    ran = script(
        """
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from mla_jax.weights import orbax_store
        from mla_jax.weights.orbax_store import open_store
        read, sound = [], orbax_store._sound
        orbax_store._sound = lambda *chunk: read.append(chunk) or sound(*chunk)
        folder = Path(sys.argv[1])
        expected = np.load(folder / "expected.npy")
        for count in (1, 2, 4, 8):
            mesh = Mesh(np.array(jax.devices()[:count]).reshape(-1, min(2, count)), ("a", "b"))
            for name in ("whole", "rows", "columns", "both"):
                chunks = len((store := open_store(folder / name)).tensors["x"].parts[0].checksums)
                for spec in (P(), P("a"), P(None, "b"), P("a", "b"), P(("a", "b")), P(None, ("a", "b"))):
                    read.clear()
                    (x,) = store.restore("x", (NamedSharding(mesh, spec),))
                    assert len(read) == chunks  # each once, however many devices have it
                    assert x.sharding.spec == spec and len(x.addressable_shards) == count
                    assert np.array_equal(np.asarray(x).view(np.uint16), expected), (count, name, spec)
        print("equal on", len(jax.devices()))
        """,
        tmp_path,
        devices=8,
    )
    assert ran.stdout == "equal on 8\n", ran.stderr


def test_a_device_reads_its_own_chunks_alone(tmp_path):
    """Of four chunks, those of the other devices are gone."""
    expected = tensor("F32", (8, 6))
    store = stored(tmp_path / "out", {"x": expected}, shards=lambda *_: (4, 1))
    for other in (0, 1, 3):
        chunk_file(tmp_path / "out", f"x.0.{other}").unlink()
    (filled,) = store._filled("x", [{third := ((4, 6), (0, 6))}])
    assert_equal([filled[third]], [expected.parts[0][4:6]])
    assert_equal(store.read("x", 4), [expected.parts[0][4]])
    with pytest.raises(BadFile, match="x cannot be read"):
        store.read("x")
