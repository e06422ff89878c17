"""The plan that is shown before anything is done, and its refusals."""

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
    assert [line.split()[0] for line in lines] == ["reads", "writes", "memory", "disk", "left", "note"]
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
        assert "out is inside the source\n  which is " in refused(capfd, source, out)
    assert "is inside the source" in refused(capfd, tmp_path / "link", source / "out")
    assert "exists already" in refused(capfd, source, source)
    assert "exists already" in refused(capfd, source, tmp_path)


COPIED = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "tiktoken.model",
)


@pytest.mark.parametrize("to", ["orbax", "hf"])
@pytest.mark.parametrize("name", COPIED)
def test_a_link_that_leaves_the_source_is_refused_and_nothing_of_it_copied(tmp_path, source, capfd, name, to):
    secret = tmp_path / "secret"
    if (source / name).exists():
        (source / name).rename(secret)
    else:
        secret.write_text("a key")
    (source / name).symlink_to(secret)
    said = refused(capfd, source, tmp_path / "out", "--to", to)
    assert said == f"3 error: {name} is a link that leaves the model folder\n  it leads to {secret}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "secret"]


def test_the_links_of_a_hub_cache_are_followed_and_their_files_copied(tmp_path, source):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    source.rename(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert convert(snapshot, tmp_path / "out") == 0
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert not (tmp_path / "out" / name).is_symlink()
        assert (tmp_path / "out" / name).read_bytes() == (blobs / name).read_bytes()


def test_a_link_within_the_source_is_followed(tmp_path, source):
    (source / "tokenizer.json").rename(source / "other.json")
    (source / "tokenizer.json").symlink_to("other.json")
    assert convert(source, tmp_path / "out") == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "other.json").read_bytes()


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


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_what_the_process_has_already_is_not_asked_for_again(tmp_path, source, monkeypatch, to):
    for module in ("plan", "export"):
        monkeypatch.setattr(f"convert.{module}.held", lambda: 1 << 50)
    assert convert(source, tmp_path / "out", "--to", to, "--dry-run") == 0
    assert convert(source, tmp_path / "out", "--to", to) == 0


def test_no_output_and_no_source_are_said(tmp_path, source, capfd):
    assert refused(capfd, source).startswith("2 error: no OUT given")
    assert refused(capfd, tmp_path / "nothing", tmp_path / "out").startswith("3 error: there is no file or folder ")
    assert refused(capfd, tmp_path, tmp_path / "out").startswith("3 error: ")


def test_a_big_endian_machine_is_refused(tmp_path, source, capfd, monkeypatch):
    monkeypatch.setattr("sys.byteorder", "big")
    assert "3 error: this machine is big-endian" in refused(capfd, source, tmp_path / "out")
