"""The steps of a model on a GPU, compiled ahead of time without one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mla_jax.cache.retrieve import RETRIEVAL_POLICIES
from pallas_kernels import choice


@pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernels need JAX 0.11.2")
def test_programs_on_an_h200_copy_no_pool_and_take_no_more_than_is_planned():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax-cuda13-plugin of JAX's own version compiles without a GPU")
    root = Path(__file__).parents[2]
    settings = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    env = os.environ | {"PYTHONPATH": str(root)} | settings
    script = Path(__file__).with_name("compile_steps.py")
    kinds = re.findall(r'^    "([^"]+)": Kind', script.read_text(), re.MULTILINE)
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {step["kind"] for step in found} == {*kinds, *RETRIEVAL_POLICIES}
    for step in found:
        copies, name = step["name"].startswith("copy"), (step["kind"], step["name"])
        if step["name"] in ("run", "mixed_step", "run_with_drafts"):
            assert step["kernels"] >= (4 if step["heads"] else 6), name  # attention in each layer, experts in two
        assert step["sorts"] == 0 or not copies, name
        assert step["copies"] == [], name
        if step["name"] == "run" and step["rows"] <= 128:
            assert step["widened"] == 0, name  # of weights in FP8, whose codes a matmul converts
        assert step["slices"] == 0, name  # of arrays, as inputs of kernels: these need not be aligned
        assert step["aliased"] >= step["pool"], name
        assert step["temporaries"] <= step["planned"], name
