"""What is said before anything is done, and what is refused then."""

import os

import pytest
from checkpoints import convert, packed_gguf, released

GIB = 2**30


@pytest.fixture
def source(tmp_path):
    return released(tmp_path / "hf", "v3", "fp8")


def files(folder) -> dict:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_a_dry_run_writes_nothing(tmp_path, source, capfd, to):
    before = files(tmp_path)
    assert convert(source, tmp_path / "out", "--dry-run", "--to", to) == 0
    assert files(tmp_path) == before
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"reads     {source} (safetensors)")
    assert f"\nwrites    {tmp_path / 'out'}: " in err


def test_the_plan_says_what_is_read_written_needed_and_left_out(tmp_path, source, capfd, monkeypatch):
    monkeypatch.setattr("convert.plan.available", lambda: 1000 * GIB)
    monkeypatch.setattr("convert.plan.free", lambda out: 7 * GIB)
    assert convert(source, tmp_path / "out", "--dry-run", "--dtype", "int8") == 0
    lines = capfd.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["reads", "writes", "memory", "disk", "left"]
    assert "deepseek_v3, 4 layers, " in lines[0]
    assert "int8 " in lines[1]
    assert "BF16 " in lines[1]
    assert lines[2].endswith(" of 1,000.00 GiB")
    assert lines[3].endswith(" of 7.00 GiB free")
    assert "2 tensors no model needs: model.layers.3.embed_tokens.weight" in lines[4]


def refused(capfd, *arguments) -> str:
    code = convert(*arguments)
    said = capfd.readouterr().err
    assert "Traceback" not in said
    return f"{code} {said[said.index('error: ') :]}"


def test_an_output_that_is_there_is_refused(tmp_path, source, capfd):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "file", "link"):
        assert refused(capfd, source, tmp_path / name).startswith(f"3 error: {tmp_path / name} exists already")


def test_an_output_in_the_source_or_around_it_is_refused(tmp_path, source, capfd):
    (tmp_path / "link").symlink_to(source)
    for out in (source / "out", tmp_path / "link" / "out", source / ".." / "hf" / "out"):
        assert "out lies inside the source\n  which is " in refused(capfd, source, out)
    assert "lies inside the source" in refused(capfd, tmp_path / "link", source / "out")
    assert "exists already" in refused(capfd, source, source)
    assert "exists already" in refused(capfd, source, tmp_path)


def test_beside_a_gguf_file_there_is_room(tmp_path):
    assert convert(packed_gguf(tmp_path / "m.gguf", "new"), tmp_path / "out") == 0


def test_an_output_that_cannot_be_written_is_refused(tmp_path, source, capfd, monkeypatch):
    assert "there is no folder " in refused(capfd, source, tmp_path / "no" / "out")
    assert "there is no folder " in refused(capfd, source, source / "config.json" / "out")
    assert "File name too long" in refused(capfd, source, tmp_path / ("n" * 300))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))  # root may write anywhere
    assert f"{tmp_path} cannot be written to\n  choose another folder" in refused(capfd, source, tmp_path / "out")


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_too_little_room_on_the_disk_is_refused(tmp_path, source, capfd, monkeypatch, to):
    monkeypatch.setattr(f"convert.{'export' if to == 'hf' else 'plan'}.free", lambda out: 100_000)
    said = refused(capfd, source, tmp_path / "out", "--to", to)
    assert said.startswith(
        f"4 error: {tmp_path / 'out'} does not fit on its disk\n  0.2 MiB are still to be written, 0.1 MiB are free"
    )
    assert not (tmp_path / "out").exists()


def test_too_little_memory_is_refused(tmp_path, source, capfd, monkeypatch):
    monkeypatch.setattr("convert.plan.available", lambda: 50 << 20)
    said = refused(capfd, source, tmp_path / "out")
    assert said.startswith("4 error: the conversion needs more memory than there is\n  memory    at most ")
    assert " of 50.0 MiB\n" in said


def test_no_output_and_no_source_are_said(tmp_path, source, capfd):
    assert refused(capfd, source).startswith("2 error: no OUT given")
    assert refused(capfd, tmp_path / "nothing", tmp_path / "out").startswith("3 error: there is no file or folder ")
    assert refused(capfd, tmp_path, tmp_path / "out").startswith("3 error: ")


def test_a_big_endian_machine_is_refused(tmp_path, source, capfd, monkeypatch):
    monkeypatch.setattr("sys.byteorder", "big")
    assert "3 error: this machine is big-endian" in refused(capfd, source, tmp_path / "out")
