"""Small JSON files: bounded reading from untrusted folders, and writing; digests of large files.

Reading refuses files over a size, duplicate keys, numbers that are not finite or too long, and halves of surrogate pairs.

Also the path of the user's cache folder."""

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from mla_jax.base.errors import BadFile, BadRequest, MlaJaxError, printable

MAX_DIGITS = 100  # of an integer: any that passes is also a finite float
FINGERPRINT_PIECES, FINGERPRINT_BYTES = 256, 4096  # of a digest of large files: samples in all, bytes of each
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path, limit: int, error: type[MlaJaxError] = BadFile) -> dict:
    """The JSON object in `path`; raises `error` if it is missing, longer than `limit` bytes or not a JSON object."""
    return parse_json(read_bounded(path, limit, error), str(path), error)


def read_bounded(path: Path, limit: int, error: type[MlaJaxError] = BadFile) -> bytes:
    """The content of a file; raises `error` if it is missing, no regular file, or longer than `limit` bytes."""
    with explained(path, "read", error):
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise error(f"{printable(str(path), 400)} is not a regular file")
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    if len(data) > limit:
        found = f"found more than {limit:,} bytes, which is the limit for this file"
        raise error(f"{path.name} is too large", found, str(path))
    return data


@contextmanager
def explained(path: str | Path, how: str, error: type[MlaJaxError] = BadRequest) -> Iterator[None]:
    """Raises `error` where a file cannot be `how`: "read", say.

    A name too long is an OSError, one with a NUL or half a surrogate pair a ValueError."""
    try:
        yield
    except (OSError, ValueError) as e:
        reason = printable(getattr(e, "strerror", None) or str(e), 200)
        raise error(f"{printable(str(path), 400)} cannot be {how}", reason) from e


@contextmanager
def allowed(path: str | Path) -> Iterator[None]:
    """Raises BadFile where the user may not read `path`, or something in it."""
    try:
        yield
    except PermissionError as e:
        where = printable(str(e.filename or path), 400)
        raise BadFile(
            f"{where} may not be read", "its permissions, or those of a folder above it, forbid it"
        ) from e


def within(folder: Path, name: str) -> Path:
    """`folder / name`; raises BadFile if that is a link out of the folder, other than into the blobs of the Hub's cache:
    those of the repository, or those that repositories share, in a folder for each two digits."""
    path, home = folder / name, folder.resolve()
    target = Path(os.path.realpath(path))  # Path.resolve() raises for a loop of links
    allowed = [home]
    if home.parent.name == "snapshots":
        repository = home.parent.parent
        allowed += [repository / "blobs", repository.parent / "blobs" / target.name[:2]]
    if target.parent not in allowed:
        raise BadFile(
            f"{printable(name)} is a link that leaves the model folder",
            f"it leads to {printable(str(target), 200)}",
        )
    return path


HOST_RATES, DEVICE_RATES = "host.json", "device.json"  # in the cache folder: measured rates


def cache_folder() -> Path | None:
    """The folder of measured rates and compiled programs; None for a user without a home, as in some containers."""
    try:
        return Path.home() / ".cache" / "mla_jax"
    except RuntimeError:
        return None


def sampled(paths: Sequence[Path]) -> str:
    """A digest of large files: of their sizes, and of pieces from all over them. Raises OSError."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            last = max(size - FINGERPRINT_BYTES, 0)
            pieces = min(max(FINGERPRINT_PIECES // len(paths), 2), size // FINGERPRINT_BYTES + 1)
            digest.update(b"%d" % size)
            for i in range(pieces):
                file.seek(last * i // max(pieces - 1, 1))
                digest.update(file.read(FINGERPRINT_BYTES))
    return digest.hexdigest()


def write_json(path: Path, value: object, indent: int | None = None) -> None:
    """Writes `value` to `path` atomically: a concurrent reader finds the old content or the new. Raises OSError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(value, indent=indent))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def parse_json(data: bytes, where: str, error: type[MlaJaxError] = BadFile) -> dict:
    """`data` as a JSON object; refuses the same as `json_value`."""
    value = json_value(data, where, error)
    if not isinstance(value, dict):
        raise error(f"{where} is not a JSON object", f"found {type(value).__name__} at the top level")
    return value


def json_value(data: bytes, where: str, error: type[MlaJaxError] = BadFile) -> Any:
    """`data` as JSON, without faults that the json module lets pass: repeated keys, NaN, infinity, half a surrogate pair."""
    fail = partial(_fail, where, error)
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=partial(_unique, fail),
            parse_constant=lambda c: fail(f"holds {c}"),
            parse_float=partial(_finite, fail),
            parse_int=partial(_short, fail),
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as e:
        half = printable(e.object[e.start])
        raise error(
            f"{where} is not valid JSON", f"it holds {half}, half of a surrogate pair, which is no character"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError, ValueError) as e:
        raise error(f"{where} is not valid JSON", printable(str(e), 200)) from e
    except RecursionError:
        raise error(f"{where} is not valid JSON", "it is nested too deeply") from None
    return value


def _fail(where: str, error: type[MlaJaxError], problem: str) -> NoReturn:
    raise error(f"{where} is not valid JSON", problem)


def _unique(fail: Callable[[str], NoReturn], items: list[tuple[str, object]]) -> dict:
    found = dict(items)
    if len(found) < len(items):
        repeated = [key for key, times in Counter(key for key, _ in items).items() if times > 1]
        fail("key given twice: " + ", ".join(printable(key) for key in repeated[:5]))
    return found


def _short(fail: Callable[[str], NoReturn], text: str) -> int:
    return int(text) if len(text) <= MAX_DIGITS else fail(f"number {text[:40]}... is too large")


def _finite(fail: Callable[[str], NoReturn], text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else fail(f"number {text[:40]} is too large")
