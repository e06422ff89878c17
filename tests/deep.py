"""Deep tests take long, together hours of a processor: `make deep` runs those that have not passed with the same files and the
same Python, JAX, Flax and numpy.

They are marked `deep`, or `deep(folder, ..)` for inputs that no import leads to. A test file depends on itself, on the files
conftest.py above it, and on all that these import or name, in turn. That is found in their text: imports inside functions count,
and so do modules and scripts in quotes. A name that is merely mentioned can make a test run again, never make it be skipped.

deep.json holds a digest for each Python and test file. `make deep` runs one file after the other and writes the digest of each
that passes, so it can be stopped and goes on. `.ci/run` ends with the files that have still to pass. DEEP=1 lets pytest run
all."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
WRITTEN = {RECORD.name, "suite.txt"}  # by .ci/run, from what it has seen: no test depends on them
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
SEARCHED = ("tests", "tools", "benchmarks", "notebooks")  # after the packages; as pyproject.toml has it
DATA = {".cpp", ".h", ".ipynb", ".json", ".jsonl", ".npz", ".safetensors", ".txt"}
TEXT = {".py", ".ipynb"}

MARK = re.compile(r"\bmark\.deep\b(?:\(([^)]*)\))?")
QUOTED = re.compile(r'"([^"]+)"')
FROM = re.compile(r"\bfrom ([\w.]+) import (\([^)]*\)|[^\n;\"'\\]+)")
IMPORT = re.compile(r"\bimport ([\w.]+(?:(?: as \w+)?, *[\w.]+)*)")
NAMED = re.compile(r"""["']([A-Za-z_]\w*(?:\.\w+)+)["']|(?:"-m", |import_module\(|importorskip\()"(\w+)\"""")
PREFIX = re.compile(r'f"([A-Za-z_][\w.]*)\.\{')  # of a module that is chosen as the program runs
LAZY, HOME = "def __getattr__(name", re.compile(r'"(\w+)": "([\w.]+)"')  # of a package that imports names as they are used
SCRIPT = re.compile(r'"([\w./-]+\.(?:py|ipynb|npz|json))"')


def versions() -> str:
    """Of all that a test's outcome depends on besides this repository."""
    return " ".join([f"python {PYTHON}", *(f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax", "numpy"))])


class Sources:
    """The files of a repository, and which of them each needs."""

    def __init__(self, root: Path, versions: str):
        self.root, self.versions = root, versions
        for name in ("_base", "_beside", "_content", "_module", "_needs", "_text"):  # each file is read once
            setattr(self, name, cache(getattr(self, name)))

    @cached_property
    def deep(self) -> dict[str, Path]:
        """The test files with deep tests, by their names from the root."""
        files = sorted((self.root / "tests").rglob("test_*.py"))
        return {file.relative_to(self.root).as_posix(): file for file in files if MARK.search(file.read_text())}

    def digest(self, test: Path) -> str:
        """Of the names and contents of all files that a test file depends on, and of the versions."""
        whole = hashlib.sha256(self.versions.encode())
        for file in sorted(self.files(test)):
            whole.update(file.relative_to(self.root).as_posix().encode() + self._content(file))
        return whole.hexdigest()[:16]

    def files(self, test: Path) -> set[Path]:
        """All files that a test file depends on, itself included."""
        above = [folder / "conftest.py" for folder in test.parents if self.root in folder.parents]
        found, waiting = set(), [test, *filter(Path.exists, above), *self._of_marks(test)]
        while waiting:
            file = waiting.pop()
            if file not in found:
                found.add(file)
                waiting += self._needs(file)
        return found

    def _text(self, file: Path) -> str:
        """A file's text; empty, if it is not one that imports."""
        return file.read_text() if file.suffix in TEXT else ""

    def _content(self, file: Path) -> bytes:
        return hashlib.sha256(file.read_bytes()).digest()

    def _of_marks(self, test: Path) -> Iterator[Path]:
        """The files in the folders that a test's marks name, pages of text among them."""
        for arguments in MARK.findall(test.read_text()):
            for folder in QUOTED.findall(arguments):
                yield from self._inside(self.root / folder)
                yield from (self.root / folder).glob("*.md")

    def _needs(self, file: Path) -> set[Path]:
        """Files that a file imports or names, and the data next to it."""
        text = self._text(file)
        named = () if LAZY in text else (*self._imported(file.parent, text), *self._named(file.parent, text))
        return {*named, *self._beside(file.parent)} if text else set()

    def _imported(self, folder: Path, text: str) -> Iterator[Path]:
        for module, names in FROM.findall(text):
            for name in re.findall(r"\w+", names):
                yield from self._module(folder, f"{module}.{name}")
        for modules in [*IMPORT.findall(FROM.sub("", text)), *("".join(found) for found in NAMED.findall(text))]:
            for module in re.findall(r"[\w.]+", modules):
                yield from self._module(folder, module)

    def _module(self, folder: Path, name: str) -> list[Path]:
        """The files of a module and of the packages that hold it; none, if it is not one of this repository's."""
        return [*self._files_of_module(folder, name)]

    def _files_of_module(self, folder: Path, name: str) -> Iterator[Path]:
        parts = name.strip(".").split(".")
        base = self._base(folder, parts[0])
        for count in range(1, len(parts) + 1) if base else ():
            path = base.joinpath(*parts[:count])
            yield from filter(Path.is_file, (path.with_suffix(".py"), path / "__main__.py"))
            if (package := path / "__init__.py").is_file():
                yield from self._package(package, parts[count:])

    def _package(self, package: Path, behind: list[str]) -> Iterator[Path]:
        """A package's own file; of one that imports names as they are used, the modules of those that are taken from it."""
        yield package
        text = self._text(package)
        for name, home in HOME.findall(text) if LAZY in text else ():
            if not behind or behind[0] == name:
                yield from self._module(package.parent, home)

    def _base(self, folder: Path, first: str) -> Path | None:
        """The folder that a module's first name is found in, for a file in `folder`."""
        folders = (self.root, folder, *(self.root / name for name in SEARCHED))
        found = (base for base in folders if (base / f"{first}.py").is_file() or (base / first).is_dir())
        return next(found, None)

    def _named(self, folder: Path, text: str) -> Iterator[Path]:
        """Scripts and data, and all modules of a package that are chosen as the program runs."""
        for name in SCRIPT.findall(text):
            yield from filter(Path.is_file, (folder / name, self.root / name))
        for package in PREFIX.findall(text):
            base = self._base(folder, package.split(".")[0])
            yield from self._inside(base.joinpath(*package.split("."))) if base else ()

    def _beside(self, folder: Path) -> list[Path]:
        """Data in a module's folder, and in folders there that hold no Python."""
        found = [path for path in folder.iterdir() if path.suffix in DATA and path.name not in WRITTEN]
        for path in filter(Path.is_dir, folder.iterdir()):
            if not path.name.startswith((".", "__")) and not any(path.rglob("*.py")):
                found += self._inside(path)
        return found

    def _inside(self, folder: Path) -> Iterator[Path]:
        return (path for path in folder.rglob("*") if path.suffix in DATA | {".py"} and ".ipynb_checkpoints" not in path.parts)


def passed(sources: Sources, record: dict[str, str]) -> set[str]:
    """The test files whose deep tests passed with what they depend on now."""
    return {name for name, file in sources.deep.items() if name in record and record[name] == sources.digest(file)}


def recorded() -> dict[str, dict[str, str]]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def waiting() -> list[str]:
    """The test files whose deep tests have not passed with what they depend on now and this Python."""
    sources = Sources(ROOT, versions())
    return sorted(sources.deep.keys() - passed(sources, recorded().get(PYTHON, {})))


def store(name: str, digest: str) -> None:
    """Writes that the deep tests of a file have passed with this Python; of files that are gone nothing is kept."""
    record = recorded()
    mine = record.get(PYTHON, {}) | {name: digest}
    record[PYTHON] = {file: mine[file] for file in mine if (ROOT / file).exists()}
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def run(name: str, select: str) -> subprocess.CompletedProcess:
    """pytest on a file's deep tests, of those that `select` has."""
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", f"deep and ({select})", name]
    return subprocess.run(line, cwd=ROOT, env=os.environ | {"DEEP": "1"}, capture_output=True, text=True)


def run_waiting(select: str, processes: int, only: Sequence[str] = ()) -> bool:
    """Whether all deep tests that waited pass, or those of some files. A line is printed for each file, and what failed."""
    sources, files = Sources(ROOT, versions()), [name for name in waiting() if not only or name in only]
    digests = {name: sources.digest(sources.deep[name]) for name in files}
    good = True
    with ThreadPoolExecutor(processes) as pool:
        runs = {pool.submit(run, name, select): name for name in files}
        for done in as_completed(runs):
            name, ended = runs[done], done.result()
            if ended.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
                continue
            last = ended.stdout.strip().rpartition("\n")[2].strip("= ")
            print(f"{name}: {last}", flush=True)
            if ended.returncode == pytest.ExitCode.OK:
                store(name, digests[name])
            else:
                print(ended.stdout + ended.stderr, flush=True)
                good = False
    return good


if __name__ == "__main__":
    if sys.argv[1:] == ["waiting"]:
        print("\n".join(waiting()))
    else:
        sys.exit(not run_waiting(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
