"""Deep tests take minutes and test some folders of sources: they run when one of these has changed since all tests last passed.

They are marked `deep(*folders)`. `.ci/run full` runs them all and then `python tests/deep.py`, which stores what the sources are
in deep.json, to be committed. `DEEP=1 make test` runs them without storing anything."""

import hashlib
import json
import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
GENERATING = ("mla_jax/cache", "mla_jax/decode", "mla_jax/engine", "mla_jax/model")  # what runs between a prompt and its answer
FOLDERS = (
    "benchmarks",
    "convert",
    "cpu_experts",
    "mla_jax/base",
    *GENERATING,
    "mla_jax/hosts",
    "mla_jax/mesh",
    "mla_jax/offload",
    "mla_jax/ui",
    "mla_jax/weights",
    "notebooks",
    "pallas_kernels",
    "tools",
)
SOURCES = {".cpp", ".h", ".ipynb", ".py", ".txt"}


def digest(folder: Path) -> str:
    """Of the names and contents of the sources in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in SOURCES and ".ipynb_checkpoints" not in path.parts)
    contents = hashlib.sha256()
    for file in files:
        contents.update(f"{file.relative_to(folder).as_posix()} {file.stat().st_size}\n".encode() + file.read_bytes())
    return contents.hexdigest()


def digests() -> dict[str, str]:
    return {folder: digest(ROOT / folder) for folder in FOLDERS}


def unchanged() -> set[str]:
    """The folders whose deep tests need not run; none where DEEP is set."""
    if os.environ.get("DEEP") or not RECORD.exists():
        return set()
    passed = json.loads(RECORD.read_text())
    return {folder for folder, found in digests().items() if passed.get(folder) == found}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(digests(), indent=1) + "\n")
