"""Threads are no more than the cores whose time the process's control groups leave it."""

import os
import subprocess
from pathlib import Path

import pytest

CORES = len(os.sched_getaffinity(0))
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"
HALF, THREE, MANY, NONE = "50000 100000\n", "250000 100000\n", "9000000 100000\n", "max 100000\n"


def v1(folder: str, quota: int, period: int = 100000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, CORES),
        ({f"{V2}/cpu.max": HALF}, 1),
        ({f"{V2}/cpu.max": "100000 100000\n"}, 1),
        ({f"{V2}/cpu.max": "100001 100000\n"}, 2),
        ({f"{V2}/cpu.max": THREE}, 3),
        ({f"{V2}/cpu.max": MANY}, 90),
        ({f"{V2}/cpu.max": NONE}, CORES),
        *(({f"{V2}/cpu.max": text}, CORES) for text in ("", "50000\n", "nonsense\n", "0 0\n", "-1 100000\n", "9" * 50 + " 1\n")),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/cpu.max": HALF}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/cpu.max": NONE, f"{V2}/a/cpu.max": HALF}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/other/cpu.max": HALF}, CORES),
        ({"proc/self/cgroup": "0::/seen/outside\n", f"{V2}/cpu.max": HALF}, 1),
        ({"proc/self/cgroup": "nonsense\n0::\n::\n:/\n", f"{V2}/cpu.max": HALF}, 1),
        (v1(V1, 50000), 1),
        (v1(V1, 5000, 2000), 3),
        (v1(V1, -1), CORES),
        ({f"{V1}/cpu.cfs_quota_us": "50000\n"}, CORES),
        ({"proc/self/cgroup": "3:cpuset:/c\n2:cpu,cpuacct:/a\n0::/\n", **v1(f"{V1}/a", 50000)}, 1),
        ({"proc/self/cgroup": "3:cpuset:/a\n2:cpu:/\n0::/\n", **v1(f"{V1}/a", 50000)}, CORES),
    ],
)
def test_a_quota_bounds_the_cores(builds, tmp_path, files, expected):
    assert cores(builds, tmp_path, files) == min(expected, CORES)


def cores(builds, root: Path, files: dict[str, str]) -> int:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    done = subprocess.run([str(builds() / "usable_cores"), str(root)], capture_output=True, text=True, check=True)
    return int(done.stdout)
