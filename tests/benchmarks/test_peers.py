"""Other libraries' layers of experts compute what the weights say, by every way in which the benchmark times them."""

import importlib

import numpy as np
import peers
import pytest

from cpu_experts import layout

pytestmark = pytest.mark.parity
MODEL, WIDTH, EXPERTS = 512, 256, 8  # kt-kernel crashes with some odd numbers of experts
# Found are half of it and more: those that do not multiply in bfloat16 round rows to 8 bits. AMXINT4 has one scale an output.
BOUNDS = {"bf16": 5e-3, "fp8_block": 5e-3, "AMXINT4": 0.35}
EIGHT_BITS = 3e-2
CASES = [
    (name, format, method)
    for name, module in peers.MODULES.items()
    for format, methods in importlib.import_module(f"peers.{module}").METHODS.items()
    for method in methods
]


def batch(tokens: int, chosen: int) -> peers.Batch:
    rng = np.random.default_rng(tokens)
    ids = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :chosen].astype(np.int32)
    bits = layout.to_bf16(rng.standard_normal((tokens, MODEL), np.float32))
    return peers.Batch(layout.from_bf16(bits), bits, ids, rng.random((tokens, chosen), np.float32))


@pytest.mark.parametrize(("name", "format", "method"), CASES)
def test_a_peer_computes_what_the_weights_say(name, format, method):
    here, words = peers.found([name])
    if name not in here:
        pytest.skip(f"{name} is {words[name]}")
    rng, formats = np.random.default_rng(0), (format,) * 3
    sizes = ((WIDTH, MODEL), (WIDTH, MODEL), (MODEL, WIDTH))
    parts = [layout.quantize(rng.standard_normal((EXPERTS, n, k), np.float32) / np.float32(k**0.5), format) for n, k in sizes]
    try:
        layer = here[name].Layer(method, parts, formats, threads=2)
        layer(batch(1, 1))
    except RuntimeError as error:
        if "needs the cpu support" not in str(error):
            raise
        pytest.skip(f"{name} cannot compute {format} on this processor")
    bound = BOUNDS.get(method, BOUNDS.get(format, EIGHT_BITS))
    for given in (batch(1, 1), batch(3, 4), batch(50, 2), batch(3, 4)):
        assert peers.distance(layer(given), peers.expected(given, parts, formats)) < bound


def test_a_peer_that_is_not_installed_is_named_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    importlib.import_module("peers.ggml")._ggml.cache_clear()
    here, words = peers.found(["llama.cpp"])
    assert here == {}
    assert words["llama.cpp"].startswith("missing: ")
    assert str(tmp_path) in words["llama.cpp"]
