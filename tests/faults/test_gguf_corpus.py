"""Every bad GGUF file of the corpus is refused: the right error, in words that help, at once, and without much memory."""

import os
import shutil
import time
import tracemalloc
from itertools import pairwise

import pytest
from faults import gguf_corpus as corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.base.errors import BadFile, MlaJaxError
from mla_jax.weights.gguf import open_gguf, read_header

VALID = corpus.valid().file()


@pytest.fixture(scope="session")
def valid(tmp_path_factory):
    """The folders before any mutation, each read once: so they are valid."""
    root = tmp_path_factory.mktemp("valid")
    corpus.write_valid(root)
    for folder in root.iterdir():
        opened = open_gguf(folder)
        assert [opened.read(name).size for name in opened.tensors]
        opened.close()
    return root


@pytest.fixture
def folder(valid, tmp_path):
    """A copy of a valid folder."""

    def copy(base: str = "single"):
        return shutil.copytree(valid / base, tmp_path / "model")

    return copy


def test_names_of_faults_are_unique():
    assert len({fault.name for fault in corpus.FAULTS}) == len(corpus.FAULTS)


@pytest.mark.parametrize("fault", corpus.FAULTS, ids=lambda fault: fault.name)
def test_a_bad_file_is_refused(fault, folder):
    path = folder(fault.base)
    fault.mutate(path)
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(fault.error) as caught:
        open_gguf(path)
    seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    text = str(caught.value)
    assert type(caught.value) is fault.error
    assert [word for word in fault.words if word not in text] == []
    assert all(line.isprintable() and len(line) < 1000 for line in text.split("\n"))
    assert (seconds < 1, peak < 8 << 20) == (True, True)


@given(data=st.data())
@settings(max_examples=600, deadline=1000)
def test_a_file_with_random_bytes_changed_is_read_or_refused(tmp_path_factory, data):
    """Half of the changes hit the header, where small numbers do most."""
    found = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 330) | st.integers(0, len(found) - 1))
        found[at] = data.draw(st.sampled_from([0, 1, 7, 8, 9, 127, 128, 255]) | st.integers(0, 255))
    _read_or_refuse(tmp_path_factory, bytes(found))


@given(data=st.data())
@settings(max_examples=300, deadline=1000)
def test_a_file_with_a_piece_cut_out_or_doubled_is_read_or_refused(tmp_path_factory, data):
    start, end = sorted(data.draw(st.lists(st.integers(0, len(VALID)), min_size=2, max_size=2)))
    again = data.draw(st.integers(0, 2))
    _read_or_refuse(tmp_path_factory, VALID[:start] + VALID[start:end] * again + VALID[end:])


@given(head=st.sampled_from([24, 60, 120, 200]), data=st.binary(max_size=400))
@settings(max_examples=300, deadline=1000)
def test_a_file_of_random_bytes_behind_a_sound_start_is_read_or_refused(tmp_path_factory, head, data):
    _read_or_refuse(tmp_path_factory, VALID[:head] + data)


def _read_or_refuse(tmp_path_factory, content: bytes):
    """What is read must lie in the file, and be disjoint."""
    file = tmp_path_factory.getbasetemp() / f"mutated-{os.getpid()}.gguf"
    file.write_bytes(content)
    try:
        header = read_header(file)
    except MlaJaxError:
        return
    spans = sorted((t.offset, t.offset + t.nbytes) for t in header.tensors)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(end <= len(content) for _, end in spans)


def first_read(monkeypatch, act):
    """Calls `act` once, just before the first tensor is read."""
    read, todo = os.preadv, [act]

    def preadv(*args):
        if todo:
            todo.pop()()
        return read(*args)

    monkeypatch.setattr(os, "preadv", preadv)


def test_a_file_cut_while_it_is_read_is_an_error_and_no_signal(folder, monkeypatch):
    path = folder()
    opened = open_gguf(path)
    first_read(monkeypatch, lambda: os.truncate(path / corpus.FILE, 100))
    with pytest.raises(BadFile, match=r"model\.gguf became shorter while it was read"):
        opened.read("experts.weight")


def test_a_file_replaced_between_its_header_and_its_weights_is_refused(folder):
    path = folder()
    opened = open_gguf(path)
    shutil.copy(path / corpus.FILE, path / "new")
    os.replace(path / "new", path / corpus.FILE)
    with pytest.raises(BadFile, match=r"model\.gguf changed while it was read"):
        opened.read("norm.weight")


def test_a_file_written_to_while_it_is_read_is_refused(folder):
    path = folder()
    opened = open_gguf(path)
    opened.read("norm.weight")
    os.utime(path / corpus.FILE, ns=(1, 1))
    with pytest.raises(BadFile, match=r"model\.gguf changed while it was read"):
        opened.close()


def test_an_error_of_the_disk_names_the_file_the_byte_and_the_tensor(folder, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    opened = open_gguf(folder())
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(BadFile, match=r"cannot be read\n.*Input/output error at byte [\d,]+, in norm\.weight"):
        opened.read("norm.weight")


def test_a_header_that_becomes_shorter_while_it_is_read_is_refused(folder, monkeypatch):
    path, stat = folder() / corpus.FILE, os.fstat

    def larger(descriptor: int):
        found = stat(descriptor)
        os.truncate(path, 30)
        return found

    monkeypatch.setattr(os, "fstat", larger)
    with pytest.raises(BadFile, match=r"model\.gguf became shorter while it was read"):
        read_header(path)


def test_no_file_stays_open_after_a_refusal(folder):
    path = folder()
    (path / corpus.FILE).write_bytes(VALID[:-40])
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(BadFile):
        open_gguf(path)
    assert set(os.listdir("/proc/self/fd")) == before
