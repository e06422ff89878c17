"""Files that change, vanish or break between their headers and their weights: an error, never a signal or a wrong answer."""

import errno
import os
import shutil

import numpy as np
import pytest
from faults import gguf_corpus, hf

from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile
from mla_jax.weights.gguf import open_gguf
from mla_jax.weights.gguf_header import read_gguf_header
from mla_jax.weights.load import load
from mla_jax.weights.orbax_store import Store, open_store
from mla_jax.weights.safetensors import open_folder

KINDS = {
    "safetensors": (open_folder, hf.FILE, hf.NORM, hf.O_PROJ),
    "gguf": (open_gguf, gguf_corpus.FILE, "norm.weight", "experts.weight"),
}
FILE = r"model\.(safetensors|gguf)"


@pytest.fixture(params=KINDS)
def opened(request, folder):
    """A model whose headers have been read, its file, a tensor, and a tensor further on."""
    opener, file, first, second = KINDS[request.param]
    path = folder(request.param)
    return opener(path), path / file, first, second


def first_read(monkeypatch, act):
    """Calls `act` once, just before the first tensor is read."""
    read, todo = os.preadv, [act]

    def preadv(*args):
        if todo:
            todo.pop()()
        return read(*args)

    monkeypatch.setattr(os, "preadv", preadv)


def test_a_file_cut_while_it_is_read_is_an_error_and_no_signal(opened, monkeypatch):
    model, file, _, second = opened
    first_read(monkeypatch, lambda: os.truncate(file, 100))
    with pytest.raises(BadFile, match=FILE + " became shorter while it was read"):
        model.read(second)


def test_a_model_cut_while_it_is_loaded_is_refused(folder, monkeypatch):
    path = folder("safetensors")
    first_read(monkeypatch, lambda: os.truncate(path / hf.FILE, 20_000))
    with pytest.raises(BadFile, match=FILE + " (became shorter|changed) while it was read"):
        load(path)


def test_a_model_written_to_while_it_is_loaded_is_refused(folder, monkeypatch):
    path = folder("safetensors")

    def scribble():
        with open(path / hf.FILE, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\1")
        os.utime(path / hf.FILE, ns=(1, 1))

    first_read(monkeypatch, scribble)
    with pytest.raises(BadFile, match=FILE + " changed while it was read"):
        load(path)


def test_a_file_written_to_after_it_was_read_is_refused_when_it_is_closed(opened):
    model, file, first, _ = opened
    model.read(first)
    os.utime(file, ns=(1, 1))
    with pytest.raises(BadFile, match=FILE + " changed while it was read"):
        model.close()


def test_a_file_replaced_between_its_header_and_its_weights_is_refused(opened):
    model, file, first, _ = opened
    shutil.copy(file, file.with_name("new"))
    os.replace(file.with_name("new"), file)
    with pytest.raises(BadFile, match=FILE + " changed while it was read"):
        model.read(first)


def test_a_file_deleted_between_its_header_and_its_weights_is_refused(opened):
    model, file, first, _ = opened
    file.unlink()
    with pytest.raises(BadFile, match=FILE + r" cannot be read\n.*No such file"):
        model.read(first)


def test_an_error_of_the_disk_names_the_file_the_byte_and_the_tensor(opened, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    model, _, first, _ = opened
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(BadFile, match=r"cannot be read\n.*Input/output error at byte [\d,]+, in .*norm\.weight"):
        model.read(first)


def test_reads_that_return_a_few_bytes_at_a_time_are_continued(opened, monkeypatch):
    model, _, _, second = opened
    whole, read = model.read(second).copy(), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: read(file, [buffers[0][:7]], offset))
    np.testing.assert_array_equal(model.read(second).view(np.uint8), whole.view(np.uint8))


def test_a_header_that_becomes_shorter_while_it_is_read_is_refused(folder, monkeypatch):
    path, stat = folder("gguf") / gguf_corpus.FILE, os.fstat

    def larger(descriptor: int):
        found = stat(descriptor)
        os.truncate(path, 30)
        return found

    monkeypatch.setattr(os, "fstat", larger)
    with pytest.raises(BadFile, match=r"model\.gguf became shorter while it was read"):
        read_gguf_header(path)


def cut_chunks(path):
    """Every chunk of what mla-convert wrote loses its last byte."""
    for file in path.glob("weights/*/state/*/c/**/*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size - 1)


def test_a_store_cut_between_its_manifest_and_its_weights_is_refused(folder):
    path = folder("store")
    store = open_store(path)
    cut_chunks(path)
    with pytest.raises(BadFile, match=r"^norm cannot be read\n  a file is missing, cut short or damaged\n  in .*weights/\d+\n"):
        store.read("norm")


def test_a_store_cut_while_it_is_loaded_is_one_error(folder, monkeypatch, capfd):
    """After a chunk's metadata was read, and before the chunk."""
    path, compare = folder("store"), Store._refuse_other_chunks

    def then_cut(*batch):
        compare(*batch)
        cut_chunks(path)

    monkeypatch.setattr(Store, "_refuse_other_chunks", then_cut)
    with pytest.raises(BadFile, match=r"^\S+ cannot be read\n  a file is missing, cut short or damaged\n  in .*weights/\d+\n"):
        load(path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", KINDS)
def test_no_file_stays_open_after_a_refusal(folder, kind):
    path = folder(kind) if kind == "gguf" else folder(kind, "fp8")
    if kind == "gguf":
        os.truncate(path / gguf_corpus.FILE, 600)
    else:
        hf.element(hf.SCALE, -1.0)(path)
    with pytest.raises(BadFile):
        load(path)
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    assert [link for link in links if os.path.exists(link) and str(path) in os.readlink(link)] == []


def test_remote_code_is_noted_and_never_imported(folder):
    path = folder("safetensors")
    (path / "modeling_x.py").write_text("raise SystemExit('imported')")
    hf.config(auto_map={"AutoModelForCausalLM": "modeling_x.X"}, trust_remote_code=True)(path)
    load(path)
    notes = " ".join(Config.from_hf(path).notes)
    assert "auto_map names remote code; it is not needed and never imported" in notes
    assert "trust_remote_code" in notes
