"""Scripts of this folder, run in a process of their own."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pallas_kernels

LIMIT = 1800  # seconds for a script, on cores that others use too
MATMULS = ("moe_decode", "quantized_matmul", "ragged_dot")
HERE, ROOT = Path(__file__).parent, Path(pallas_kernels.__file__).parents[1]


@pytest.fixture(scope="session")
def run():
    """`run(script, *arguments, **environment)` -> its output; threads, dumps and platforms are settled when JAX starts."""

    def run(script: str, *arguments: str, **environment: str) -> str:
        env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
        command = [sys.executable, str(HERE / script), *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT - 10, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


@pytest.fixture(scope="session")
def interpreted(run):
    """`interpreted(op)` -> what the interpreter prints of an op's GPU kernel, and the rows in it by the names of their cases."""

    @functools.cache
    def of(op: str) -> tuple[str, dict[str, dict]]:
        text = run("interpret_matmul.py" if op in MATMULS else "interpret.py", op, NPROC="64")  # each warpgroup waits in a thread
        return text, {row["name"]: row for row in map(json.loads, (x for x in text.splitlines() if x.startswith("{")))}

    return of
