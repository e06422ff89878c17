"""Memory and cores that this process may use: the system's, within the limits of control groups, as containers have them.

The system's files, of version 2 of the groups and of version 1, are looked for below a `root`."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FILE_SYSTEM = Path("/")


def free_memory(root: Path = FILE_SYSTEM) -> int:
    """Bytes that are free; what groups hold of files counts as free, as in the system's own figure, for it can be read again."""
    left = [_numbers(root / "proc/meminfo")["MemAvailable:"] * 1024]
    for folder in _groups("memory", root):
        for limit, held, files in (("max", "current", ""), ("limit_in_bytes", "usage_in_bytes", "total_")):
            names = (f"{files}{kind}_file" for kind in ("active", "inactive"))
            with suppress(OSError, ValueError):  # there is none, or it is "max"
                most, taken = (int((folder / f"memory.{name}").read_text()) for name in (limit, held))
                stat = _numbers(folder / "memory.stat")
                left.append(most - taken + sum(stat.get(name, 0) for name in names))
    return max(min(left), 0)


def cores(root: Path = FILE_SYSTEM) -> int:
    """As many as `cpu_experts` takes threads: those that may be used, and no more than the groups' time is worth."""
    found = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for folder in _groups("cpu", root):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):
                quota, period = map(int, " ".join((folder / name).read_text() for name in files).split())
                found += [-(-quota // period)] if quota > 0 and period > 0 else []
    return min(found)


def last_cache(root: Path = FILE_SYSTEM) -> int:
    """Bytes of the caches farthest from the cores, all of them together; 0 where the system does not tell."""
    found: dict[int, dict[str, int]] = {}
    for folder in root.glob("sys/devices/system/cpu/cpu[0-9]*/cache/index[0-9]*"):
        with suppress(OSError, ValueError):
            level, shared, size = (
                (folder / name).read_text().strip() for name in ("level", "shared_cpu_list", "size")
            )
            found.setdefault(int(level), {})[shared] = int(size.removesuffix("K")) << 10
    return sum(found[max(found)].values()) if found else 0


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the process's group and of all that it is in.

    In a container the path may be the machine's, of which nothing is seen there: then the uppermost is its own."""
    own = {}
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    for mount in ("", controller):  # of version 2, and of version 1
        path = Path(own.get(mount, ""))
        yield from (root / "sys/fs/cgroup" / mount / group for group in (path, *path.parents))


def _numbers(path: Path) -> dict[str, int]:
    """Of lines that begin with a name and a number; none where there is no such file."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def gib(size: int) -> str:
    """A number of bytes in words."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**27 else f"{size / 2**20:,.1f} MiB"
