"""Scripts of this folder, run in a process of their own."""

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
