"""The TPU kernels, compiled without a TPU."""

import json

import pytest

pytestmark = pytest.mark.deep


@pytest.mark.slow
def test_the_kernels_compile_for_v5e_and_v6e_at_real_sizes_within_the_memory_they_have(run):
    pytest.importorskip("libtpu", reason="libtpu, of the version that jax[tpu] names, compiles without a TPU")
    offline = {"TPU_SKIP_MDS_QUERY": "1"}  # asks no network what machine it is on
    rows = run("compile_tpu.py", JAX_ENABLE_COMPILATION_CACHE="false", **offline)
    rows = [json.loads(row) for row in rows.splitlines()]
    assert {row["device"] for row in rows} == {"TPU v5 lite", "TPU v6 lite"}
    for row in rows:
        assert row["vmem"] < 12 << 20, row
        assert not row["copied"], row
