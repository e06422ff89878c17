"""Memory and cores of a process are those of its control groups, where these leave it less than the machine has."""

import os
from pathlib import Path

import pytest

from mla_jax.base import limits

CORES = len(os.sched_getaffinity(0))
GIB = 1 << 30
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
CPU = "sys/fs/cgroup/cpu"


def laid(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {8 << 20} kB\nHugePages_Total: 0\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(folder: str, limit: int | str, held: int) -> dict[str, str]:
    return {f"{folder}/memory.max": f"{limit}\n", f"{folder}/memory.current": f"{held}\n"}


def v1(folder: str, limit: int, held: int) -> dict[str, str]:
    return {f"{folder}/memory.limit_in_bytes": f"{limit}\n", f"{folder}/memory.usage_in_bytes": f"{held}\n"}


OF_FILES = "anon 5\ninactive_file 1073741824\nactive_file 1073741824\ninactive_anon 7\n"


def cache(cpu: int, index: int, level: int, shared: str, size: str) -> dict[str, str]:
    names = {"level": level, "shared_cpu_list": shared, "size": size}
    return {f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}/{name}": f"{value}\n" for name, value in names.items()}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 0),
        (cache(0, 2, 2, "0", "2048K"), 2048),
        ({**cache(0, 2, 2, "0", "2048K"), **cache(0, 3, 3, "0-1", "32768K"), **cache(1, 3, 3, "0-1", "32768K")}, 32768),
        ({**cache(0, 3, 3, "0", "32768K"), **cache(12, 3, 3, "12", "16384K"), **cache(12, 2, 2, "12", "1024K")}, 49152),
        ({**cache(0, 2, 2, "0", "2048K"), **cache(0, 3, 3, "0", "nonsense")}, 2048),
    ],
)
def test_the_last_caches_are_those_of_the_highest_level(tmp_path, files, expected):
    assert limits.last_cache(laid(tmp_path, files)) == expected << 10


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        (v2(V2, 4 * GIB, GIB), 3),
        (v2(V2, 4 * GIB, 5 * GIB), 0),
        (v2(V2, 16 * GIB, GIB), 8),
        (v2(V2, "max", GIB), 8),
        (v2(V2, "", GIB), 8),
        ({f"{V2}/memory.max": "1\n"}, 8),
        ({**v2(V2, 4 * GIB, 4 * GIB), f"{V2}/memory.stat": OF_FILES}, 2),
        ({**v2(f"{V2}/a/b", 4 * GIB, GIB), "proc/self/cgroup": "0::/a/b\n"}, 3),
        ({**v2(f"{V2}/a", 4 * GIB, GIB), **v2(f"{V2}/a/b", "max", GIB), "proc/self/cgroup": "0::/a/b\n"}, 3),
        ({**v2(f"{V2}/other", 4 * GIB, GIB), "proc/self/cgroup": "0::/a/b\n"}, 8),
        ({**v2(V2, 4 * GIB, GIB), "proc/self/cgroup": "0::/seen/outside\n"}, 3),
        ({**v2(V2, 4 * GIB, GIB), "proc/self/cgroup": "nonsense\n"}, 3),
        (v1(V1, 4 * GIB, GIB), 3),
        (v1(V1, 2**63 - 4096, GIB), 8),
        ({**v1(V1, 4 * GIB, 4 * GIB), f"{V1}/memory.stat": "inactive_file 1\ntotal_inactive_file 1073741824\n"}, 1),
        ({**v1(f"{V1}/a", 4 * GIB, GIB), "proc/self/cgroup": "5:memory,hugetlb:/a\n4:cpu:/b\n0::/\n"}, 3),
        ({**v1(f"{V1}/b", 4 * GIB, GIB), "proc/self/cgroup": "5:memory:/a\n4:cpu:/b\n0::/\n"}, 8),
    ],
)
def test_free_memory_is_what_groups_leave(tmp_path, files, expected):
    assert limits.free_memory(laid(tmp_path, files)) == expected * GIB


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, CORES),
        ({f"{V2}/cpu.max": "50000 100000\n"}, 1),
        ({f"{V2}/cpu.max": "100001 100000\n"}, 2),
        *(({f"{V2}/cpu.max": text}, CORES) for text in ("max 100000\n", "", "50000\n", "0 0\n", "-1 100000\n", "nonsense\n")),
        ({f"{V2}/a/cpu.max": "50000 100000\n", "proc/self/cgroup": "0::/a/b\n"}, 1),
        ({f"{CPU}/cpu.cfs_quota_us": "50000\n", f"{CPU}/cpu.cfs_period_us": "100000\n"}, 1),
        ({f"{CPU}/cpu.cfs_quota_us": "-1\n", f"{CPU}/cpu.cfs_period_us": "100000\n"}, CORES),
    ],
)
def test_cores_are_what_groups_leave(tmp_path, files, expected):
    assert limits.cores(laid(tmp_path, files)) == min(expected, CORES)


def test_this_machine_has_both():
    assert limits.free_memory() > 0
    assert 1 <= limits.cores() <= CORES
