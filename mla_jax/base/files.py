"""Small JSON files: bounded reading from untrusted folders (a size cap, no duplicate keys, finite numbers only), and writing.

And the folder of the user's cache."""

import json
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from mla_jax.base.errors import BadFile, MlaJaxError, printable

MAX_DIGITS = 100  # of an integer: any that passes is also a finite float


def read_json(path: Path, limit: int, error: type[MlaJaxError] = BadFile) -> dict:
    """The JSON object in `path`; raises `error` when it is missing, over `limit` bytes or not a plain object."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        raise error(f"{path} is not a regular file")
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as e:
        raise error(f"{path} cannot be read", printable(getattr(e, "strerror", None) or str(e))) from e
    if len(data) > limit:
        raise error(f"{path.name} is too large", f"found more than {limit:,} bytes, which is the limit for this file", str(path))
    return parse_json(data, str(path), error)


HOST_RATES, DEVICE_RATES = "host.json", "device.json"  # in the cache folder: measured rates


def cache_folder() -> Path | None:
    """Where what is worth keeping is kept; None for a user without a home, as containers may have."""
    try:
        return Path.home() / ".cache" / "mla_jax"
    except RuntimeError:
        return None


def write_json(path: Path, value: object, indent: int | None = None) -> None:
    """Puts `value` into a file as a whole: whoever reads it meanwhile finds what was there before. Raises OSError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(value, indent=indent))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def parse_json(data: bytes, where: str, error: type[MlaJaxError] = BadFile) -> dict:
    """`data` as a JSON object, refusing what the json module lets pass: repeated keys, NaN, infinity."""

    def fail(problem: str):
        raise error(f"{where} is not valid JSON", problem)

    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique(fail),
            parse_constant=lambda c: fail(f"holds {c}"),
            parse_float=_finite(fail),
            parse_int=_short(fail),
        )
    except (UnicodeDecodeError, json.JSONDecodeError, ValueError) as e:
        raise error(f"{where} is not valid JSON", printable(str(e), 200)) from e
    except RecursionError:
        raise error(f"{where} is not valid JSON", "it is nested too deeply") from None
    if not isinstance(value, dict):
        raise error(f"{where} is not a JSON object", f"found {type(value).__name__} at the top level")
    return value


def _unique(fail: Callable):
    def pairs(items: list[tuple[str, object]]) -> dict:
        found = dict(items)
        if len(found) < len(items):
            repeated = [key for key, times in Counter(key for key, _ in items).items() if times > 1]
            fail("key given twice: " + ", ".join(printable(key) for key in repeated[:5]))
        return found

    return pairs


def _short(fail: Callable):
    def number(text: str) -> int:
        return int(text) if len(text) <= MAX_DIGITS else fail(f"number {text[:40]}... is too large")

    return number


def _finite(fail: Callable):
    def number(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else fail(f"number {text[:40]} is too large")

    return number
