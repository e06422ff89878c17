"""How the programs of tests are compiled, and where they are stored. JAX reads both when it is imported.

Most run once, on tiny arrays, and nearly all of the time would be the compiler's: so it optimises little. With
COMPILE=users, and in processes that run what users run, programs are compiled as users compile them."""

import os
import time
from importlib.metadata import version
from pathlib import Path

# For all workers, the processes that tests start, and later runs. The user's own cache stays untouched. JAX's keys tell versions,
# options and processors apart.
STORED = Path(__file__).parents[1] / ".compiled"
PROGRAMS = STORED / "xla"
DAYS = 7
# A quicker code generator that XLA has in JAX 0.10; later versions know no such flag, and end there.
QUICK = "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""


def settle() -> None:
    """For this process and those that it starts, before JAX is imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    if os.environ.get("COMPILE") != "users":
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        os.environ["XLA_FLAGS"] = f"{_flags_of_users()} {QUICK}".strip()


def as_users() -> dict[str, str]:
    """The environment of a process that compiles as users do."""
    return os.environ | {"XLA_FLAGS": _flags_of_users(), "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}


def forget_old() -> None:
    """Removes files older than a week: most of them are of sources that have changed."""
    oldest = time.time() - DAYS * 24 * 3600
    for file in PROGRAMS.glob("*"):
        if file.stat().st_mtime < oldest:
            file.unlink(missing_ok=True)


def _flags_of_users() -> str:
    flags = os.environ.get("XLA_FLAGS", "")  # quick ones already in a process that tests have started
    return flags.replace(QUICK, "").strip() if QUICK else flags
