"""The GPU kernels of all ops: compiled without a GPU, and interpreted with threads that run far ahead of each other."""

import json

import pytest

from pallas_kernels import choice

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernels need JAX 0.11.2"),
]


def test_the_kernels_compile_for_an_h200_and_hardly_spill(run, tmp_path):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax-cuda13-plugin of JAX's own version compiles without a GPU")
    dumps = {"MOSAIC_GPU_DUMP_TO": str(tmp_path), "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1"}
    rows = run("compile.py", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", JAX_ENABLE_COMPILATION_CACHE="false", **dumps)
    rows = [json.loads(x) for x in rows.splitlines() if x.startswith("{")]
    ops = {"append", "decode", "heads", "prefill", "sparse", "route", "few_experts", "experts", "packed_experts"}
    assert {row["op"] for row in rows} == ops  # compile.py fails at a program without one
    for row in rows:
        assert row["spills"] <= 64, row  # bytes, of what a row or the order of a tile starts with: none beside products
        assert not row["serialized"], row
        assert row.get("in_place", True), row
        assert not row.get("wraps"), row


def test_kernels_hold_in_whatever_order_their_threads_run(run):
    text = run("late.py", NPROC="64")  # fails where a barrier is completed that nobody has waited for
    rows = [json.loads(x) for x in text.splitlines() if x.startswith("{")]
    assert len(rows) == 12
    assert all(row["error"] <= 2 * row["fallback"] and row["lse"] < 1e-5 for row in rows)
    assert "RACE DETECTED" not in text
