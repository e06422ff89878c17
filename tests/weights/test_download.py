"""A model comes from the Hub into its local cache: whole or not at all, its own files alone, each of them once."""

import contextlib
import errno
import shutil
import signal
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import compiling
import pytest
from loopback import no_network  # noqa: F401
from small_hub import digest, small_hub

import mla_jax
from mla_jax import BadFile, BadRequest, DoesNotFit, Unsupported, generate
from mla_jax.base.options import Options
from mla_jax.engine.opening.opened import open_model
from mla_jax.serve import __main__ as serve
from mla_jax.ui.download import DownloadOptions, fetched
from mla_jax.weights import download as module
from mla_jax.weights.hub import DEMO, resolve
from mla_jax.weights.open import open_source

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")

ROOT = Path(__file__).parents[2]
NAME = "owner/model"
CONFIG = (DEMO / "config.json").read_bytes()
SHARDS = {f"model-0000{i}-of-00003.safetensors": bytes([i]) * 200_000 for i in (1, 2, 3)}
OTHERS = {
    "README.md": b"words",
    ".gitattributes": b"*",
    "modeling.py": b"raise SystemExit",
    "pytorch_model.bin": b"x" * 5000,
    "consolidated.00.pth": b"x" * 5000,
    "original/model.safetensors": b"x" * 5000,
    "model.gguf": b"x" * 5000,
}
NEEDED = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors.index.json": b'{"weight_map": {}}', **SHARDS}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache and nothing of the user's own environment."""
    for name in ("HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def hub(monkeypatch):
    with small_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def commit(hub) -> str:
    """Of a repository with a model and much else."""
    return hub.repository(NAME).add(OTHERS | NEEDED)


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---- a whole model


def test_a_model_is_its_own_files_alone_and_its_name_leads_to_them(hub, commit, cache):
    folder = mla_jax.download(NAME)
    assert folder == cache / "models--owner--model" / "snapshots" / commit == resolve(NAME)
    assert content(folder) == NEEDED
    assert {file for file, _ in hub.served} == {*NEEDED}


def test_a_second_download_fetches_nothing(hub, commit):
    folder = mla_jax.download(NAME)
    hub.served.clear()
    assert mla_jax.download(NAME) == folder
    assert hub.served == []


def test_the_notes_tell_commit_size_and_folder_and_how_to_pin_them(hub, commit, cache):
    notes = []
    folder = module.fetch(module.hub_name(NAME), notes.append)
    assert notes == [
        f"downloading 6 files of {NAME}, 0.6 MB, into {cache}",
        f"downloaded {NAME} at {commit} (0.6 MB) in {folder}; pin it with --revision {commit}",
    ]
    notes.clear()
    module.fetch(module.hub_name(NAME, commit), notes.append)
    assert notes == [f"the cache has {NAME} at {commit} (0.6 MB) in {folder}"]


@pytest.mark.deep
@pytest.mark.slow
def test_the_demo_model_from_the_hub_answers_as_the_bundled_one(hub, capfd):
    hub.repository(NAME).add({p.name: p.read_bytes() for p in DEMO.iterdir()})
    asked = ["def add(a, b):", "--temperature", "0", "--max-tokens", "12"]
    assert generate.main([*asked, "--quiet"]) == 0
    expected = capfd.readouterr().out
    assert generate.main([*asked, "--model", NAME, "--download"]) == 0
    found = capfd.readouterr()
    assert found.out == expected
    assert f"downloaded {NAME} at " in found.err
    assert open_model(Options.of(model=NAME)).name == NAME


# ---- broken off, and taken up


def test_a_connection_that_breaks_goes_on_where_it_broke(hub, commit, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # else 10 MB, and a begun chunk is fetched again
    file = "model-00002-of-00003.safetensors"
    hub.breaks[file] = 70_000
    with contextlib.suppress(BadFile):  # by old versions of huggingface_hub: they go on at the next call
        mla_jax.download(NAME)
    assert content(mla_jax.download(NAME)) == NEEDED
    assert [size for name, size in hub.served if name == file] == [70_000, 130_000]


def test_a_download_that_is_broken_off_is_no_model_and_the_next_one_fetches_the_rest(hub, commit, cache):
    last = "model-00003-of-00003.safetensors"
    hub.down.add(last)
    with pytest.raises(BadFile, match="the Hub refuses owner/model") as caught:
        mla_jax.download(NAME)
    assert "the same command fetches the rest" in str(caught.value)
    with pytest.raises(BadFile, match="the local cache has a part of owner/model"):
        resolve(NAME)
    hub.down.clear()
    hub.served.clear()
    assert content(mla_jax.download(NAME)) == NEEDED
    assert {file for file, _ in hub.served} == {last, "config.json"}
    assert not list(cache.rglob("*.incomplete"))


def test_an_update_that_is_broken_off_leaves_the_older_model(hub, commit):
    folder = mla_jax.download(NAME)
    newer = "model-00001-of-00003.safetensors"
    hub.repository(NAME).add(NEEDED | {newer: b"n" * 200_000})
    hub.down.add(newer)
    with pytest.raises(BadFile):
        mla_jax.download(NAME)
    assert resolve(NAME) == folder
    hub.down.clear()
    hub.served.clear()
    assert resolve(NAME) != mla_jax.download(NAME) == resolve(NAME)
    assert {file for file, _ in hub.served} == {newer, "config.json"}


def test_ctrl_c_ends_a_download_at_once_and_the_next_one_fetches_the_rest(hub, commit, cache):
    hub.holds.add("model-00002-of-00003.safetensors")
    line = [sys.executable, "-m", "mla_jax.generate", "--model", NAME, "--download", "--dry-run"]
    with subprocess.Popen(line, cwd=ROOT, env=compiling.as_users(), stderr=subprocess.PIPE, text=True) as process:
        assert hub.reached.wait(120)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "interrupted"
    hub.holds.clear()
    hub.served.clear()
    assert content(mla_jax.download(NAME)) == NEEDED
    assert {file for file, _ in hub.served} == {*SHARDS, "config.json"} - {"model-00001-of-00003.safetensors"}


# ---- revisions


def test_a_revision_pins_the_model(hub, commit):
    newer = hub.repository(NAME).add(NEEDED | {"tokenizer.json": b'{"a": 1}'}, "v2", "refs/pr/4")
    assert mla_jax.download(NAME, revision=commit).name == commit
    assert [mla_jax.download(NAME, revision=revision).name for revision in ("v2", "refs/pr/4")] == [newer, newer]
    assert [resolve(f"{NAME}@{revision}").name for revision in (commit, "v2", "refs/pr/4")] == [commit, newer, newer]
    with pytest.raises(BadFile, match="has 2 snapshots of it, none of them main"):
        resolve(NAME)
    with pytest.raises(BadFile, match="none of them v3"):
        resolve(f"{NAME}@v3")


def test_files_that_two_revisions_have_are_fetched_once_and_need_no_room(hub, commit, monkeypatch):
    mla_jax.download(NAME)
    hub.repository(NAME).add(NEEDED | {"README.md": b"more words"})
    hub.served.clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: pytest.fail("there is nothing to fetch"))
    assert content(mla_jax.download(NAME)) == NEEDED
    assert hub.served == []


@pytest.mark.parametrize("revision", ["../main", "a b", "", "x:y.gguf", "-"])
def test_a_text_that_is_no_revision_is_refused(hub, commit, revision):
    with pytest.raises((BadRequest, BadFile), match="revision"):
        mla_jax.download(NAME, revision=revision)
    assert hub.served == []


def test_a_revision_is_given_once():
    with pytest.raises(BadRequest, match="given twice: v1 and v2"):
        mla_jax.download(f"{NAME}@v1", revision="v2")


# ---- GGUF


def test_of_a_repository_with_gguf_files_the_named_one_is_fetched(hub, cache):
    hub.repository(NAME).add({"a-Q4_K.gguf": b"4" * 5000, "a-Q8_0.gguf": b"8" * 9000})
    path = mla_jax.download(f"{NAME}:a-Q8_0.gguf")
    assert path.read_bytes() == b"8" * 9000
    assert path == resolve(f"{NAME}:a-Q8_0.gguf")
    assert [file for file, _ in hub.served] == ["a-Q8_0.gguf"]
    with pytest.raises(BadFile, match=r"no a-Q4_K\.gguf of owner/model"):
        resolve(f"{NAME}:a-Q4_K.gguf")


def test_all_parts_of_a_split_file_are_fetched_the_named_one_last(hub):
    parts = {f"Q4/a-0000{i}-of-00003.gguf": bytes([i]) * 5000 for i in (1, 2, 3)}
    hub.repository(NAME).add(parts | {"Q8/a-00001-of-00002.gguf": b"8"})
    path = mla_jax.download(f"{NAME}:Q4/a-00001-of-00003.gguf")
    assert [p.read_bytes() for p in sorted(path.parent.iterdir())] == [*parts.values()]
    assert [file for file, _ in hub.served] == [sorted(parts)[i] for i in (1, 2, 0)]


def test_gguf_files_are_listed_where_none_or_an_absent_one_is_named(hub):
    hub.repository(NAME).add({"config.json": CONFIG, "a-Q4_K.gguf": b"4", "Q8/a.gguf": b"8"})
    for name in (NAME, f"{NAME}:b.gguf"):
        with pytest.raises(BadRequest, match=r"a-Q4_K\.gguf"):
            mla_jax.download(name)
    assert hub.served == []


# ---- refusals


@pytest.mark.parametrize("files", [{"config.json": CONFIG, "pytorch_model.bin": b"x"}, {"model.safetensors": b"x"}, {}])
def test_a_repository_without_a_model_is_refused(hub, files):
    hub.repository(NAME).add(files)
    with pytest.raises(Unsupported, match="no model that can be opened"):
        mla_jax.download(NAME)
    assert hub.served == []


def test_an_architecture_that_cannot_run_is_refused_before_its_weights_are_fetched(hub, cache):
    hub.repository(NAME).add(NEEDED | {"config.json": b'{"model_type": "llama", "hidden_size": 64}'})
    with pytest.raises(mla_jax.MlaJaxError):
        mla_jax.download(NAME)
    assert [file for file, _ in hub.served] == ["config.json"]
    assert not cache.exists()


def test_a_repository_that_is_missing_or_gated_says_what_to_do(hub, commit, cache):
    with pytest.raises(BadFile, match="the Hub has no model owner/other") as caught:
        mla_jax.download("owner/other")
    assert "hf auth login" in str(caught.value)
    hub.repository(NAME).gated = True
    with pytest.raises(BadFile, match="owner/model is gated") as caught:
        mla_jax.download(NAME)
    assert "accept its conditions" in str(caught.value)
    assert not cache.exists()


def test_a_revision_that_is_missing_says_so(hub, commit, cache):
    with pytest.raises(BadFile, match="owner/model has no revision v9"):
        mla_jax.download(NAME, revision="v9")
    assert not cache.exists()


def test_without_a_network_the_error_says_so(monkeypatch, cache):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
    with pytest.raises(BadFile, match="owner/model could not be fetched") as caught:
        mla_jax.download(NAME)
    assert "is there a network?" in str(caught.value)
    assert not cache.exists()


def test_hugging_faces_own_offline_mode_is_kept(hub, commit, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(BadFile, match="HF_HUB_OFFLINE is set"):
        mla_jax.download(NAME)


def test_a_disk_that_is_too_small_is_told_before_weights_are_fetched(hub, commit, cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(400_000))
    with pytest.raises(DoesNotFit, match=r"takes 0\.6 MB of disk, and 0\.4 MB are free") as caught:
        mla_jax.download(NAME)
    assert "HF_HUB_CACHE" in str(caught.value)
    assert not cache.exists()


def test_a_disk_that_fills_up_meanwhile_is_told_too(hub, commit, monkeypatch):
    def fill(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fill)
    with pytest.raises(DoesNotFit, match="is full"):
        mla_jax.download(NAME)


def test_without_huggingface_hub_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Unsupported, match="needs the package huggingface_hub") as caught:
        mla_jax.download(NAME)
    assert '".[download]"' in str(caught.value)


@pytest.mark.parametrize("name", ["", "model", "a/b/c", "../b", "owner/model:file.bin", "https://huggingface.co/owner/model"])
def test_a_text_that_is_no_name_of_the_hub_is_refused(name):
    with pytest.raises(BadRequest, match="ORG/NAME"):
        mla_jax.download(name)


# ---- flags


def test_a_folder_is_not_fetched_and_neither_is_the_demo(tmp_path, capsys):
    assert generate.main(["AB", "--model", str(tmp_path), "--download"]) == 2
    assert "is here already" in capsys.readouterr().err
    assert generate.main(["AB", "--download"]) == 2
    assert "need --model" in capsys.readouterr().err


def test_a_faulty_command_fetches_nothing(hub, commit):
    assert generate.main(["--model", NAME, "--download"]) == 2
    assert generate.main(["AB", "--model", NAME, "--download", "--out", "x"]) == 2
    assert hub.served == []


def test_a_revision_without_download_reads_the_local_cache_alone(hub, commit):
    options = fetched(Options.of(model=NAME), DownloadOptions(revision=commit))
    assert options.model.model == f"{NAME}@{commit}"
    assert hub.served == []
    with pytest.raises(BadFile, match="does not have it"):
        resolve(options.model.model)
    module.download(NAME, commit)
    assert resolve(options.model.model).name == commit


def test_a_server_names_a_pinned_model_without_its_revision(hub, commit, monkeypatch):
    asked = []
    monkeypatch.setattr("mla_jax.serve.server.serve", lambda *given: asked.append(given) or 0)
    assert serve.main(["--model", NAME, "--download", "--revision", commit]) == 0
    ((settings, options),) = asked
    assert list(settings.model_name) == [NAME]
    assert resolve(options.model.model).name == commit


def test_evaluations_fetch_their_model(hub, capsys):
    from mla_jax.evaluate.__main__ import main

    assert main(["bench", "--model", "owner/other", "--download"]) == 3
    assert "the Hub has no model owner/other" in capsys.readouterr().err


# ---- the cache of huggingface_hub 2, where repositories share contents


def test_contents_in_the_store_that_repositories_share_can_be_opened(cache, hub):
    hub.repository(NAME).add({p.name: p.read_bytes() for p in DEMO.iterdir()})
    folder = mla_jax.download(NAME)
    weights = (DEMO / "model.safetensors").read_bytes()
    own, shared = cache / "models--owner--model" / "blobs" / digest(weights), cache / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    own.replace(shared)
    own.symlink_to(Path("../../blobs/ab") / shared.name)
    assert open_source(folder).config.model_type == "deepseek_v3"


def test_a_link_out_of_the_cache_is_refused_as_before(cache, hub, tmp_path):
    hub.repository(NAME).add({p.name: p.read_bytes() for p in DEMO.iterdir()})
    folder = mla_jax.download(NAME)
    outside = tmp_path / "blobs" / "ab" / ("ab" * 32)
    outside.parent.mkdir(parents=True)
    shutil.copy(folder / "model.safetensors", outside)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(BadFile, match="leaves the model folder"):
        open_source(folder)
