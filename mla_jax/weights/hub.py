"""What a user calls a model to its folder: a path, or the name of one in the local Hugging Face cache. Downloads nothing."""

import difflib
import os
import re
from pathlib import Path

from mla_jax.base.errors import BadFile, printable

NEEDS = "a model is a folder with config.json, *.safetensors and tokenizer.json, one that mla-convert wrote, or a GGUF file"
DEMO = Path(__file__).parent.parent / "demo"  # the model that comes with the package
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def resolve(model: str | Path | None) -> Path:
    """Where `model` lies: itself if that exists, else the newest snapshot of that name in the Hub's cache; None is the demo."""
    if model is None:
        return DEMO
    if not str(model):
        raise BadFile("the model's name is empty", NEEDS)
    try:
        path = Path(model).expanduser()
        if path.exists():
            return path
    except (OSError, ValueError, RuntimeError):  # a name too long for the system, with a NUL, or of a user who is none
        path = Path(model)
    if _NAME.fullmatch(str(model)) and ".." not in str(model):
        return _snapshot(str(model), path)
    raise BadFile(f"there is no file or folder {_shown(path)}", NEEDS, *_nearest(path))


def cache() -> Path:
    """The Hub's cache, found as its own library finds it: below `~` for a user without a home."""
    given = os.environ.get
    if folder := given("HF_HUB_CACHE") or given("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expanduser(folder))
    home = given("HF_HOME") or Path(given("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.path.expanduser(home)) / "hub"


def _snapshot(name: str, path: Path) -> Path:
    """The snapshot that the branch main names, or the only one there is."""
    repository = cache() / f"models--{name.replace('/', '--')}"
    snapshots = sorted(p for p in repository.glob("snapshots/*") if p.is_dir())
    main = repository / "refs" / "main"
    wanted = main.read_text(errors="replace")[:200].strip() if main.is_file() else ""
    chosen = [p for p in snapshots if p.name == wanted] or (snapshots if len(snapshots) == 1 else [])
    if chosen:
        return chosen[0]
    state = f"has {len(snapshots)} snapshots of it, none of them main" if snapshots else "does not have it"
    raise BadFile(
        f"{name} is neither a folder nor a model in the local cache",
        f"the cache {_shown(cache())} {state}, and nothing is downloaded here",
        f"fetch it once with `hf download {name}`; {NEEDS}",
        *_nearest(path),
    )


def _nearest(path: Path) -> list[str]:
    """The folder beside `path` that has almost its name, as a line for the user."""
    try:
        beside = [p.name for p in path.parent.iterdir() if p.is_dir() or p.suffix == ".gguf"]
    except (OSError, ValueError):
        return []
    close = difflib.get_close_matches(path.name, beside, n=1)
    return [f"did you mean {_shown(path.parent / close[0])}?"] if close else []


def _shown(path: Path) -> str:
    return printable(str(path), 200)
