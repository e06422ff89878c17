"""Finds a model by its path, or by its name in the local Hugging Face cache. Downloads nothing."""

import difflib
import os
import re
from pathlib import Path
from typing import NamedTuple

from mla_jax.base.errors import BadFile, BadRequest, printable
from mla_jax.base.files import allowed

NEEDS = "a model is a folder with config.json, *.safetensors and tokenizer.json, one that mla-convert wrote, or a GGUF file"
FORM = "a name of the Hub is ORG/NAME, ORG/NAME@REVISION or ORG/NAME:FILE.gguf"
DEMO = Path(__file__).parent.parent / "demo"  # the model that comes with the package
MAIN = "main"  # the branch of a name without a revision
_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([\w./-]{{1,250}}))?(?::([\w./-]{{1,250}}\.gguf))?", re.ASCII)


class HubName(NamedTuple):
    """A repository of the Hub; a branch, tag or commit of it; and a GGUF file, where it holds several models."""

    repository: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def of(cls, name: str) -> "HubName | None":
        """None if it has another form than FORM."""
        found = _NAME.fullmatch(name)
        return cls(*found.groups()) if found and ".." not in name else None

    def at(self, revision: str | None) -> "HubName":
        """The same model at `revision`, if one is given; raises BadRequest if the name has one, or `revision` is none."""
        if revision is None:
            return self
        if self.revision is not None:
            raise BadRequest(f"a revision is given twice: {self.revision} and {printable(revision)}")
        if (changed := HubName.of(f"{self.repository}@{revision}")) is None or changed.file:
            found = f"{printable(revision)} is no revision"
            raise BadRequest(found, "expected a branch, a tag, or a commit of 40 hexadecimal digits")
        return self._replace(revision=revision)

    @property
    def folder(self) -> Path:
        """The repository's folder in the cache."""
        return cache() / f"models--{self.repository.replace('/', '--')}"

    @property
    def ref(self) -> Path:
        """The file in the cache that has the commit of a branch or tag."""
        return self.folder / "refs" / (self.revision or MAIN)

    def snapshot(self, commit: str) -> Path:
        """The folder in the cache of the files at `commit`."""
        return self.folder / "snapshots" / commit

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repository + revision + (f":{self.file}" if self.file else "")


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
    if name := HubName.of(str(model)):
        return _cached(name, path)
    raise BadFile(f"there is no file or folder {_shown(path)}", NEEDS, *_nearest(path))


def cache() -> Path:
    """The Hub's cache folder, by the same environment variables as in huggingface_hub."""
    variable = os.environ.get
    folder = variable("HF_HUB_CACHE") or variable("HUGGINGFACE_HUB_CACHE")
    if folder:
        return Path(os.path.expanduser(folder))  # which leaves ~ as it is for a user without a home
    home = variable("HF_HOME") or Path(variable("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.path.expanduser(home)) / "hub"


def _cached(name: HubName, path: Path) -> Path:
    """The snapshot of `name`, or the GGUF file in it. Raises BadFile if it is not in the cache, or not all of it."""
    snapshot = _snapshot(name, path)
    if name.file:
        return _file_of(snapshot, name)
    found = [p.name for p in snapshot.iterdir()]
    if found and "config.json" not in found and not any(file.endswith(".gguf") for file in found):
        raise BadFile(
            f"the local cache has a part of {name}",
            f"{_shown(snapshot)} has no config.json, which is fetched last",
            "fetch the rest with --download",
        )
    return snapshot


def _file_of(snapshot: Path, name: HubName) -> Path:
    file = snapshot / (name.file or "")
    if not file.exists():
        found = f"the local cache has no {name.file} of {name.repository}"
        raise BadFile(found, f"{_shown(snapshot)} does not have it", "fetch it with --download")
    return file


def _snapshot(name: HubName, path: Path) -> Path:
    """The snapshot of the revision, by default main's, else the only one; raises BadFile if there is no such snapshot."""
    snapshots = sorted(p for p in name.folder.glob("snapshots/*") if p.is_dir())
    commit = name.ref.read_text(errors="replace")[:200].strip() if name.ref.is_file() else name.revision
    is_only = name.revision is None and len(snapshots) == 1
    for snapshot in snapshots:
        if snapshot.name == commit or is_only:
            return snapshot
    others = f"has {len(snapshots)} snapshots of it, none of them {name.revision or MAIN}"
    state = others if snapshots else "does not have it"
    raise BadFile(
        f"{name} is neither a folder nor a model in the local cache",
        f"the cache {_shown(cache())} {state}, and nothing is downloaded here",
        f"fetch it once with --download, or with `hf download {name.repository}`; {NEEDS}",
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
