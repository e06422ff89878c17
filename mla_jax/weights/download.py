"""Fetches a model from the Hugging Face Hub into its local cache, by huggingface_hub. Nothing else is downloaded.

A download that is broken off is no model: config.json, or the GGUF file that is named, comes last, and only then does the
branch or tag lead to the new snapshot. Files that are complete stay in the cache, and are not fetched again."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from mla_jax.base.config import OTHER_QUANTIZATION, Config
from mla_jax.base.errors import (
    BadFile,
    BadRequest,
    DoesNotFit,
    MlaJaxError,
    Unsupported,
    printable,
    shortened,
)
from mla_jax.weights.hub import FORM, MAIN, HubName, cache

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
TEXT_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tiktoken.model",
    OTHER_QUANTIZATION,
)
LISTING_SECONDS = 30.0  # that the Hub has for its list of files
CONTINUES = "complete files stay in the cache; the same command fetches the rest"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = re.compile(r"(.+-)\d{5}(-of-\d{5}\.gguf)", re.DOTALL)  # of a split GGUF file


class RemoteFile(NamedTuple):
    """A file of a repository: its bytes, and the name of its content in the cache."""

    name: str
    size: int
    digest: str


class RemoteModel(NamedTuple):
    """The files of a model at a commit, in the order in which they are fetched."""

    name: HubName
    commit: str
    files: list[RemoteFile]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def path(self) -> Path:
        """The place of the model in the cache: a folder, or the GGUF file that is named."""
        folder = self.name.snapshot(self.commit)
        return folder / self.name.file if self.name.file else folder

    def missing(self) -> list[RemoteFile]:
        """The files that the cache does not have, also not in another snapshot."""
        folder, contents = self.name.snapshot(self.commit), self.name.folder / "blobs"
        return [
            f for f in self.files if not (folder / f.name).exists() and not (contents / f.digest).exists()
        ]


def download(name: str, revision: str | None = None) -> Path:
    """The folder of a model of the Hugging Face Hub, or its GGUF file, which is fetched into the local cache.

    `name` is ORG/NAME, or ORG/NAME:FILE.gguf; `revision` is a branch, a tag or a commit, by default main. A second call fetches
    the files that are missing. Raises BadRequest, BadFile, BadConfig, Unsupported, or DoesNotFit where the disk is too small."""
    return fetch(hub_name(name, revision))


def hub_name(name: str, revision: str | None = None) -> HubName:
    """A model of the Hub at a revision; raises BadRequest for a path, or another form of name."""
    if os.path.exists(name):
        raise BadRequest(
            f"{printable(name)} is here already", "only models of the Hub are fetched and have revisions"
        )
    if (found := HubName.of(name)) is None:
        raise BadRequest(f"{printable(name)} is no model of the Hub", FORM)
    return found.at(revision)


def _unheard(line: str) -> None:
    """Takes a note that nobody asked for."""


def fetch(name: HubName, note: Callable[[str], None] = _unheard) -> Path:
    """As `download`. `note` gets lines for the user: the commit, sizes and the folder."""
    library = _library()
    with _explained(library, name):
        model = _listed(library, name)
        missing = model.missing()
        if missing:
            _refuse_unknown_architecture(library, model)
            _refuse_small_disk(model, sum(file.size for file in missing))
            note(_beginning(model, missing))
        # One after the other in this thread, so that Ctrl-C ends it; hf_xet fetches pieces of a file in parallel.
        for file in model.files:
            _fetch_file(library, model, file.name, cache())
        _point_to(model)
    pin = "" if name.revision == model.commit else f"; pin it with --revision {model.commit}"
    what = "downloaded" if missing else "the cache has"
    note(f"{what} {name.repository} at {model.commit} ({_size(model.size)}) in {model.path}{pin}")
    return model.path


def _library() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as e:
        hint = 'install the extra "download", as in: pip install -e ".[download]"'
        raise Unsupported("a download needs the package huggingface_hub, which is not installed", hint) from e
    return huggingface_hub


def _listed(library: ModuleType, name: HubName) -> RemoteModel:
    """The files that the model needs, as the Hub lists them."""
    found = library.HfApi(endpoint=_endpoint()).model_info(
        name.repository, revision=name.revision or MAIN, files_metadata=True, timeout=LISTING_SECONDS
    )
    if not _COMMIT.fullmatch(found.sha or ""):
        raise BadFile(f"the Hub names no commit of {name}", f"found {printable(str(found.sha))}")
    files = {s.rfilename: RemoteFile(s.rfilename, s.size or 0, _digest(s)) for s in found.siblings or ()}
    chosen = _parts_of_file(name, files) if name.file else _files_of_folder(name, files)
    return RemoteModel(name, found.sha, [files[file] for file in chosen])


def _digest(sibling: Any) -> str:
    """The name of a file's content in the cache: of a large one its SHA-256, else git's own."""
    return str(sibling.lfs.sha256 if sibling.lfs else sibling.blob_id)


def _files_of_folder(name: HubName, files: dict[str, RemoteFile]) -> list[str]:
    """Config, tokenizer and safetensors at the top of the repository; no duplicates in other formats or folders."""
    weights = sorted(file for file in files if file.endswith(".safetensors") and "/" not in file)
    if not weights or CONFIG not in files:
        _refuse_without_weights(name, sorted(files))
    return [*(file for file in (*TEXT_FILES, INDEX) if file in files), *weights, CONFIG]


def _refuse_without_weights(name: HubName, files: list[str]) -> None:
    ggufs = [file for file in files if file.endswith(".gguf")]
    if ggufs:
        shown = shortened([f"{name.repository}:{printable(file, 200)}" for file in ggufs])
        raise BadRequest(f"{name.repository} holds GGUF files, so name one", *shown)
    raise Unsupported(
        f"{name} is no model that can be opened",
        f"expected {CONFIG} and *.safetensors at its top, or GGUF files",
        "pickled weights (.bin, .pt) are not opened",
    )


def _parts_of_file(name: HubName, files: dict[str, RemoteFile]) -> list[str]:
    """The GGUF file that is named, behind the other parts of a split one."""
    file = name.file or ""
    if file not in files:
        ggufs = [printable(f, 200) for f in sorted(files) if f.endswith(".gguf")]
        raise BadRequest(
            f"{name.repository} has no file {file}", *shortened(ggufs or ["it has no GGUF files"])
        )
    pieces = _PART.fullmatch(file)
    others = [
        f for f in sorted(files) if pieces and (p := _PART.fullmatch(f)) and p.groups() == pieces.groups()
    ]
    return [*(f for f in others if f != file), file]


def _refuse_unknown_architecture(library: ModuleType, model: RemoteModel) -> None:
    """Raises BadConfig or Unsupported for a config.json of which no model can be made, before its weights are fetched."""
    if model.name.file is None:
        with tempfile.TemporaryDirectory() as folder:
            Config.from_hf(Path(_fetch_file(library, model, CONFIG, Path(folder))))


def _refuse_small_disk(model: RemoteModel, size: int) -> None:
    folder = next(p for p in (cache().absolute(), *cache().absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DoesNotFit(
            f"{model.name.repository} takes {_size(size)} of disk, and {_size(free)} are free",
            f"it goes into {printable(str(cache()), 200)}",
            "free some room there, or set HF_HUB_CACHE to a folder on another disk",
        )


def _fetch_file(library: ModuleType, model: RemoteModel, file: str, into: Path) -> str:
    return library.hf_hub_download(
        model.name.repository, file, revision=model.commit, cache_dir=into, endpoint=_endpoint()
    )


def _endpoint() -> str | None:
    """The Hub's address, if it is not huggingface.co; read when it is needed, as the cache's folder is."""
    return os.environ.get("HF_ENDPOINT") or None


def _point_to(model: RemoteModel) -> None:
    """Has the branch or tag lead to the snapshot, whose files are complete now."""
    if model.name.revision != model.commit:
        ref = model.name.ref
        ref.parent.mkdir(parents=True, exist_ok=True)
        partial = ref.with_name(f"{ref.name}.{os.getpid()}")
        partial.write_text(model.commit)
        partial.replace(ref)


def _beginning(model: RemoteModel, missing: list[RemoteFile]) -> str:
    size, files = _size(sum(file.size for file in missing)), "file" if len(missing) == 1 else "files"
    return f"downloading {len(missing)} {files} of {model.name}, {size}, into {cache()}"


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


@contextmanager
def _explained(library: ModuleType, name: HubName) -> Iterator[None]:
    """Makes errors of huggingface_hub, of its HTTP client and of the disk ours."""
    try:
        yield
    except MlaJaxError:
        raise
    except Exception as error:  # httpx's have no base in common with huggingface_hub's
        raise _translated(library.errors, name, error) from error


def _translated(errors: Any, name: HubName, error: Exception) -> MlaJaxError:
    """The first that fits, from special to general."""
    login = "log in with `hf auth login`, or set HF_TOKEN"
    found = printable(f"{type(error).__name__}: {error}".splitlines()[0], 300)
    if os.strerror(errno.ENOSPC) in str(error):
        hint = "free some room there, or set HF_HUB_CACHE to a folder on another disk"
        return DoesNotFit(f"the disk of {printable(str(cache()), 200)} is full", hint, CONTINUES)
    known: list[tuple[type, str, str]] = [
        (
            errors.GatedRepoError,
            f"{name} is gated",
            f"accept its conditions on its page of the Hub, then {login}",
        ),
        (
            errors.RepositoryNotFoundError,
            f"the Hub has no model {name.repository} that you may read",
            f"check its name; if it is private, {login}",
        ),
        (
            errors.RevisionNotFoundError,
            f"{name.repository} has no revision {name.revision or MAIN}",
            "expected a branch, a tag, or a commit of 40 hexadecimal digits",
        ),
        (
            errors.OfflineModeIsEnabled,
            f"HF_HUB_OFFLINE is set, so {name} is not fetched",
            "unset it; or leave out --download, and the local cache is read alone",
        ),
        (errors.HfHubHTTPError, f"the Hub refuses {name}", CONTINUES),
        (
            PermissionError,
            f"{name} cannot be written to {printable(str(cache()), 200)}",
            "set HF_HUB_CACHE to another folder",
        ),
    ]
    for kind, finding, hint in known:
        if isinstance(error, kind):
            return BadFile(finding, found, hint)
    hint = "is there a network? without --download the local cache is read alone"
    return BadFile(f"{name} could not be fetched", found, hint, CONTINUES)
