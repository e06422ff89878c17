"""The steps of a model on a GPU, compiled ahead of time without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import choice


@pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernels need JAX 0.11.2")
def test_steps_on_an_h200_copy_no_pool():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax-cuda13-plugin of JAX's own version compiles without a GPU")
    root = Path(__file__).parents[2]
    settings = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    env = os.environ | {"PYTHONPATH": str(root)} | settings
    script = Path(__file__).with_name("compile_steps.py")
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 14
    for step in found:
        if not step["step"].startswith("pages"):
            assert step["kernels"] >= 6, step  # attention in each layer, experts in two
        else:
            assert step["sorts"] == 0, step
        assert step["copies"] == [], step
        assert step["slices"] == 0, step  # of arrays, as inputs of kernels: these need not be aligned
        assert step["aliased"] >= step["pool"], step
        assert step["temporaries"] < step["pool"] / 10, step
