"""Scripts of this folder, run in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pallas_kernels

HERE, ROOT = Path(__file__).parent, Path(pallas_kernels.__file__).parents[1]


@pytest.fixture(scope="session")
def run():
    """`run(script, **environment)` -> what it printed; threads, dumps and platforms are settled when JAX starts."""

    def run(script: str, **environment: str) -> str:
        env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
        done = subprocess.run(
            [sys.executable, str(HERE / script)], env=env, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


@pytest.fixture(scope="session")
def on_gpu(run):
    """What the interpreter prints of the GPU kernels, and the rows in it by the names of their cases."""
    text = run("interpret.py", NPROC="64")  # each warpgroup waits in a thread
    return text, {row["name"]: row for row in map(json.loads, (x for x in text.splitlines() if x.startswith("{")))}
