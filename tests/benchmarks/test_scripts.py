"""Every measuring script loads, and those that have a small setting come to its end. Their figures are not judged here."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from ops import timing
from paired import Difference

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
SMALL = {
    "contexts.py": [],
    "crowd.py": [],
    "drafts.py": [],
    "engine.py": [],
    "features.py": ["--only", "draft lookup"],
    "first_answer.py": ["--formats", "bf16"],
    "forms.py": [],
    "grammars.py": [],
    "k2_experts.py": ["--rows", "1", "3"],
    "kept_steps.py": [],
    "host_pages.py": [],
    "loads.py": [],
    "longcontext.py": [],
    "over_http.py": [],
    "policies.py": ["--policy", "snapkv", "kvzip", "probe", "--budget", "uniform", "--keep", "0.2"],
    "meshes.py": ["--meshes", "data=2", "tensor=2", "--rows", "1", "3", "--held", "320", "--drafts"],
    "prefill.py": [],
    "ruler.py": [],
    "soak.py": [],
    "sparse_steps.py": [],
    "updating.py": ["--formats", "bf16", "fp8_block"],
}


@pytest.fixture
def settled(monkeypatch):
    """Processes and paths that scripts set for themselves are as before afterwards."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("settled")
def test_a_script_loads(path):
    try:
        runpy.run_path(str(path), run_name="script")
    except ModuleNotFoundError as error:
        if path.stem.startswith("peer_"):
            pytest.skip(f"{error.name} is no dependency")
        raise


@pytest.mark.deep("benchmarks")
@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_small_measurement_comes_to_its_end(name, tmp_path):
    command = [sys.executable, f"benchmarks/{name}", "--small", *SMALL[name], "--out", str(tmp_path / "found.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "found.json").stat().st_size > 100


def test_the_interval_of_a_difference_is_that_of_its_mean():
    """Of many normal draws, 1.96 standard errors; where nothing differs, nothing."""
    mine, other = np.random.default_rng(0).normal(size=(2, 2000)) + [[1.0], [0.5]]
    found, error = Difference.of(mine, other), (mine - other).std() / 2000**0.5
    assert found.mean == pytest.approx((mine - other).mean())
    assert (found.low, found.high) == pytest.approx((found.mean - 1.96 * error, found.mean + 1.96 * error), rel=0.05)
    assert Difference.of(np.ones(3), np.zeros(3)) == (1, 1, 1)


def test_a_timed_program_gives_what_the_first_of_its_inputs_gives_though_it_goes_on_to_others():
    program = timing.Program(lambda n, x: x * n, [(jnp.int32(n), jnp.ones(3)) for n in (2, 5)], most=4)
    assert program.calls == 4
    assert program.out().tolist() == [2, 2, 2]
