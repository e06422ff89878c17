"""Finds a model by its path, or by its name in the local Hugging Face cache. Downloads nothing."""

import difflib
import os
import re
from pathlib import Path

from mla_jax.base.errors import BadFile, printable
from mla_jax.base.files import allowed

NEEDS = "a model is a folder with config.json, *.safetensors and tokenizer.json, one that mla-convert wrote, or a GGUF file"
DEMO = Path(__file__).parent.parent / "demo"  # the model that comes with the package
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def resolve(model: str | Path | None) -> Path:
    """The path of `model`: itself if it exists, else its snapshot in the Hub's cache; None is the demo. Raises BadFile."""
    if model is None:
        return DEMO
    if not str(model):
        raise BadFile("the model's name is empty", NEEDS)
    try:
        path = Path(model).expanduser()
        with allowed(path):
            if path.exists():
                return path
    except (OSError, ValueError, RuntimeError):  # a name that is too long, has a NUL, or has an unknown ~user
        path = Path(model)
    if _NAME.fullmatch(str(model)) and ".." not in str(model):
        return _snapshot(str(model), path)
    raise BadFile(f"there is no file or folder {_shown(path)}", NEEDS, *_nearest(path))


def cache() -> Path:
    """The Hub's cache folder, by the same environment variables as in huggingface_hub."""
    variable = os.environ.get
    folder = variable("HF_HUB_CACHE") or variable("HUGGINGFACE_HUB_CACHE")
    if folder:
        return Path(os.path.expanduser(folder))  # which leaves ~ as it is for a user without a home
    home = variable("HF_HOME") or Path(variable("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.path.expanduser(home)) / "hub"


def _snapshot(name: str, path: Path) -> Path:
    """The snapshot that the branch main names, else the only one; raises BadFile if there is no such snapshot."""
    repository = cache() / f"models--{name.replace('/', '--')}"
    snapshots = sorted(p for p in repository.glob("snapshots/*") if p.is_dir())
    main = repository / "refs" / "main"
    commit = main.read_text(errors="replace")[:200].strip() if main.is_file() else ""
    for snapshot in snapshots:
        if snapshot.name == commit or len(snapshots) == 1:
            return snapshot
    state = f"has {len(snapshots)} snapshots of it, none of them main" if snapshots else "does not have it"
    raise BadFile(
        f"{name} is neither a folder nor a model in the local cache",
        f"the cache {_shown(cache())} {state}, and nothing is downloaded here",
        f"fetch it once with `hf download {name}`; {NEEDS}",
        *_nearest(path),
    )


def _nearest(path: Path) -> list[str]:
    """A line that suggests the folder or GGUF file next to `path` with the most similar name, if there is one."""
    try:
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir() or p.suffix == ".gguf"]
    except (OSError, ValueError):
        return []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return [f"did you mean {_shown(path.parent / close[0])}?"] if close else []


def _shown(path: Path) -> str:
    return printable(str(path), 200)
