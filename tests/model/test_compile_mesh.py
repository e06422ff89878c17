"""The programs of DeepSeek-V3's shapes on eight H200s, compiled ahead of time without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hollow
import pytest
from models import FAMILIES, yarn

from pallas_kernels import choice

LAYERS, EXPERTS, GIB = 6, 3, 1 << 30  # half of these layers have experts
V3 = {
    **FAMILIES["v3"],
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129_280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 163_840,
    "rope_scaling": yarn(40, 1.0, 1.0, 4096),
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}


@pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernels need JAX 0.11.2")
def test_v3_compiles_for_eight_h200s(tmp_path):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax-cuda13-plugin of JAX's own version compiles without a GPU")
    folder, root = hollow.folder(tmp_path / "v3", V3), Path(__file__).parents[2]
    settings = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, Path(__file__).with_name("compile_mesh.py"), folder, "data=8"]
    env = os.environ | {"PYTHONPATH": str(root)} | settings
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    planned, decode, prompt = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert decode["messages"] == {"all-gather": 1 + EXPERTS, "reduce-scatter": EXPERTS, "all-reduce": 2}
    assert decode["arguments"] < planned["weights"] + planned["pool"] + GIB // 4
    assert decode["temporaries"] < GIB
    assert prompt["temporaries"] < GIB, "layers share the room of their tokens"
    assert min(decode["kernels"], prompt["kernels"]) > 6 * LAYERS
