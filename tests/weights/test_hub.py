"""A model's name becomes its folder without a network: paths, the Hub's local cache, helpful words for the rest."""

from pathlib import Path

import pytest

from mla_jax.base.errors import BadFile
from mla_jax.weights import hub
from mla_jax.weights.open import open_source

NAME = "deepseek-ai/DeepSeek-V2-Lite"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache and nothing of the user's own environment."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def store(cache: Path, *snapshots: str, main: str | None = None) -> Path:
    repository = cache / "models--deepseek-ai--DeepSeek-V2-Lite"
    for snapshot in snapshots:
        (repository / "snapshots" / snapshot).mkdir(parents=True)
    if main is not None:
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(main)
    return repository / "snapshots"


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_is_itself_even_if_it_looks_like_a_name_of_the_hub(tmp_path, cache, kind):
    store(cache, "abc")
    (tmp_path / NAME).mkdir(parents=True)
    assert hub.resolve(kind(NAME)) == Path(NAME)
    assert hub.resolve(kind(tmp_path)) == tmp_path


def test_a_name_in_the_cache_is_the_snapshot_that_main_names(cache):
    snapshots = store(cache, "abc", "def", main="def\n")
    assert hub.resolve(NAME) == snapshots / "def"


@pytest.mark.parametrize("main", [None, "gone", "../../../.."])
def test_without_main_the_only_snapshot_is_taken(cache, main):
    snapshots = store(cache, "abc", main=main)
    assert hub.resolve(NAME) == snapshots / "abc"


def test_without_main_none_of_several_snapshots_is_guessed(cache):
    store(cache, "abc", "def")
    with pytest.raises(BadFile, match="2 snapshots"):
        hub.resolve(NAME)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, "/home/user/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_hubs_own_library_keeps_it(monkeypatch, variables, expected):
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HOME", "/home/user")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub.cache() == Path(expected)


def test_a_name_that_is_not_in_the_cache_says_how_to_fetch_it_and_fetches_nothing(cache):
    with pytest.raises(BadFile, match="nothing is downloaded") as caught:
        hub.resolve(NAME)
    assert f"hf download {NAME}" in str(caught.value)
    assert "config.json" in str(caught.value)
    assert not cache.exists()


def test_a_misspelt_folder_is_told_its_neighbour(tmp_path):
    (tmp_path / "models" / "DeepSeek-V2-Lite").mkdir(parents=True)
    for wrong in ("models/DeepSeek-V2-Light", tmp_path / "models" / "DeepSek-V2-Lite"):
        with pytest.raises(BadFile, match=r"did you mean .*models/DeepSeek-V2-Lite"):
            hub.resolve(wrong)


@pytest.mark.parametrize(
    "name", ["", "~nobody/x", "nowhere", "./nowhere", "/no/such/place", "a/b/c", "../x/../y", "x" * 5000, "nul\x00", "-a/b"]
)
def test_what_is_no_folder_and_no_name_is_told_what_a_folder_needs(name):
    with pytest.raises(BadFile, match=r"config\.json"):
        hub.resolve(name)


def test_a_file_instead_of_its_folder_is_told_the_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(BadFile, match="is a file") as caught:
        open_source(hub.resolve(tmp_path / "model.safetensors"))
    assert f"did you mean the folder {tmp_path}" in str(caught.value)


def test_a_user_without_a_home_is_told_so_of_a_name(monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    with pytest.raises(BadFile, match=r"the cache ~/\.cache/huggingface/hub does not have it"):
        hub.resolve("owner/name")
