"""Every bad folder of the corpus is refused: the right error, in words that help, at once, without touching the weights."""

import os
import shutil
import time

import numpy as np
import pytest
from faults import corpus

from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile
from mla_jax.weights import safetensors
from mla_jax.weights.load import load


@pytest.fixture(scope="session")
def valid(tmp_path_factory):
    """The folders before any mutation, each loaded once: so they are valid, and what loading compiles is compiled."""
    root = tmp_path_factory.mktemp("valid")
    corpus.write_valid(root)
    for folder in root.iterdir():
        load(folder)
    return root


@pytest.fixture
def folder(valid, tmp_path):
    """A copy of a valid folder."""

    def copy(base: str = "single"):
        return shutil.copytree(valid / base, tmp_path / "model")

    return copy


@pytest.fixture
def reads(monkeypatch):
    """The names of the tensors that were read."""
    names, read = [], safetensors.Folder.read
    monkeypatch.setattr(safetensors.Folder, "read", lambda self, *piece: (names.append(piece[0]), read(self, *piece))[1])
    return names


def test_names_of_faults_are_unique():
    assert len({fault.name for fault in corpus.FAULTS}) == len(corpus.FAULTS)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of the float64 weight that overflows
@pytest.mark.parametrize("fault", corpus.FAULTS, ids=lambda fault: fault.name)
def test_a_bad_folder_is_refused(fault, folder, reads):
    path = folder(fault.base)
    fault.mutate(path)
    start = time.process_time()
    with pytest.raises(fault.error) as caught:
        load(path)
    assert time.process_time() - start < 1
    text = str(caught.value)
    assert type(caught.value) is fault.error
    assert [word for word in fault.words if word not in text] == []
    assert all(line.isprintable() and len(line) < 1000 for line in text.split("\n"))
    assert len(text.split("\n")) < 30
    assert bool(reads) == fault.reads


def first_read(monkeypatch, act):
    """Calls `act` once, just before the first tensor is read."""
    read, todo = os.preadv, [act]
    monkeypatch.setattr(
        os, "preadv", lambda *args: ([f() for f in iter(lambda: todo.pop() if todo else None, None)], read(*args))[1]
    )


def test_a_file_cut_while_it_is_read_is_an_error_and_no_signal(folder, monkeypatch):
    path = folder()
    first_read(monkeypatch, lambda: os.truncate(path / corpus.FILE, 20_000))
    with pytest.raises(BadFile, match=r"model\.safetensors (became shorter|changed) while it was read"):
        load(path)


def test_a_file_written_to_while_it_is_read_is_refused(folder, monkeypatch):
    path = folder()

    def scribble():
        with open(path / corpus.FILE, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\1")
        os.utime(path / corpus.FILE, ns=(1, 1))

    first_read(monkeypatch, scribble)
    with pytest.raises(BadFile, match=r"model\.safetensors changed while it was read"):
        load(path)


def test_a_file_replaced_between_its_header_and_its_weights_is_refused(folder):
    opened = safetensors.open_folder(path := folder())
    shutil.copy(path / corpus.FILE, path / "new")
    os.replace(path / "new", path / corpus.FILE)
    with pytest.raises(BadFile, match=r"model\.safetensors changed while it was read"):
        opened.read(corpus.NORM)


def test_a_file_deleted_between_its_header_and_its_weights_is_refused(folder):
    opened = safetensors.open_folder(path := folder())
    (path / corpus.FILE).unlink()
    with pytest.raises(BadFile, match=r"model\.safetensors cannot be read\n.*No such file"):
        opened.read(corpus.NORM)


def test_an_error_of_the_disk_names_the_file_the_byte_and_the_tensor(folder, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    opened = safetensors.open_folder(folder())
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(BadFile, match=r"cannot be read\n.*Input/output error at byte [\d,]+, in model\.norm\.weight"):
        opened.read(corpus.NORM)


def test_reads_that_return_a_few_bytes_at_a_time_are_continued(folder, monkeypatch):
    opened, read = safetensors.open_folder(folder()), os.preadv
    whole = opened.read(corpus.O_PROJ).copy()
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:7]], offset))
    np.testing.assert_array_equal(opened.read(corpus.O_PROJ).view(np.uint8), whole.view(np.uint8))


def test_no_file_stays_open_after_a_refusal(folder):
    path = folder("fp8")
    corpus.element(corpus.SCALE, -1.0)(path)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(BadFile):
        load(path)
    left = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in set(os.listdir("/proc/self/fd")) - before
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    assert not [file for file in left if str(path) in file]


def test_remote_code_is_noted_and_never_imported(folder):
    path = folder()
    (path / "modeling_x.py").write_text("raise SystemExit('imported')")
    corpus.config(auto_map={"AutoModelForCausalLM": "modeling_x.X"}, trust_remote_code=True)(path)
    load(path)
    notes = " ".join(Config.from_hf(path).notes)
    assert "auto_map names remote code; it is not needed and never imported" in notes
    assert "trust_remote_code" in notes
