"""A process's peak memory, on a CPU, against its plan."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import models
import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "n_routed_experts": 32,
    "num_hidden_layers": 9,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 16384,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 2048,
}
HF = {**models.FAMILIES["v3"], **SIZES}

MEASURED = """
import json, sys
import jax
from mla_jax import LLM, SamplingParams

def status(key):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

jax.devices()
before = status("VmRSS")
llm = LLM(sys.argv[1], dtype=sys.argv[2], context=512)
llm.generate([list(range(300))], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
print(json.dumps([status("VmHWM") - before, llm.plan.needed]))
"""


def write_gigabyte(folder: Path) -> Path:
    """About 0.9 GiB in bfloat16, most of it experts."""
    values = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32) * 0.02
    found = {}
    for name, shape in models.shapes(HF).items():
        found[name] = np.resize(values, shape).astype(np.float32 if "bias" in name else ml_dtypes.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF))
    save_file(found, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_process_takes_the_memory_that_its_plan_says(tmp_path, dtype):
    folder = write_gigabyte(tmp_path / "model")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, str(folder), dtype]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    taken, planned = json.loads(done.stdout.splitlines()[-1])
    assert 0.85 * planned < taken < 1.15 * planned, f"{taken / 2**30:.2f} GiB taken, {planned / 2**30:.2f} planned"
