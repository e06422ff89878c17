"""The implementation that is chosen on each device, and the reasons for refusals."""

from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import choice, testing, tuning
from pallas_kernels.mla_decode import CHECKS as DECODE
from pallas_kernels.mla_prefill import CHECKS as PREFILL

recent = choice.too_old() is None
DEVICES = {
    "cpu": SimpleNamespace(platform="cpu", device_kind="cpu"),
    "H200": SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0"),
    "A100": SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0"),
    "v4": SimpleNamespace(platform="tpu", device_kind="TPU v4"),
    "v5e": SimpleNamespace(platform="tpu", device_kind="TPU v5 lite"),
    "v6e": SimpleNamespace(platform="tpu", device_kind="TPU v6 lite"),
}


@pytest.fixture
def decode():
    inputs = testing.mla_decode_inputs(testing.MLA_DECODE[0])
    return [x for name, x in inputs.items() if name != "seq_lens"]


@pytest.fixture
def prefill():
    return [testing.mla_prefill_inputs(testing.MLA_PREFILL[0])[name] for name in "qkv"]


@pytest.fixture
def on(monkeypatch):
    return lambda name: monkeypatch.setattr(jax, "devices", lambda *_: [DEVICES[name]])


@pytest.mark.parametrize("device", DEVICES)
def test_each_device_gets_its_kernel_or_the_fallback(on, decode, prefill, device):
    on(device)
    tpu = "mosaic_tpu" if device in ("v5e", "v6e") else "xla"
    gpu = "mosaic_gpu" if device == "H200" and recent else "xla"
    expected = tpu if tpu != "xla" else gpu
    assert choice.choose("mla_decode", None, DECODE, *decode) == expected
    assert choice.choose("mla_prefill", None, PREFILL, *prefill) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_that_is_not_here_gets_what_it_would_get_there_with_a_jax_that_compiles_it(decode, device):
    kind = choice.Kind(**vars(DEVICES[device]))
    with choice.as_if_on(kind):
        assert choice.device() == kind.device_kind
        found = choice.choose("mla_decode", None, DECODE, *decode)
        assert choice.kernels_here() == (found != "xla")
    assert found == {"H200": "mosaic_gpu", "v5e": "mosaic_tpu", "v6e": "mosaic_tpu"}.get(device, "xla")
    assert choice.device() == jax.devices()[0].device_kind


@pytest.mark.parametrize(("impl", "device", "says"), [("mosaic_tpu", "v4", "TPU v5e or newer, this is TPU v4"),
                                                      ("mosaic_tpu", "H200", "this is NVIDIA H200"),
                                                      ("mosaic_gpu", "A100", "Hopper" if recent else "JAX")])  # fmt: skip
def test_a_device_that_will_not_do_is_named(on, decode, impl, device, says):
    on(device)
    with pytest.raises(choice.Unsupported, match=says):
        choice.choose("mla_decode", impl, DECODE, *decode)


@pytest.mark.parametrize(("name", "shape", "says"), [("c_kv", (4, 24, 512), "powers of two from 16, not 24"),
                                                     ("k_pe", (4, 64, 48), "rotary widths 32 and 64, not 48"),
                                                     ("page_table", (64, 4096), "entries, not 262144")])  # fmt: skip
def test_what_the_tpu_kernel_cannot_take_falls_back_and_says_why(on, decode, name, shape, says):
    on("v5e")
    place = ["q_c", "q_pe", "c_kv", "k_pe", "page_table"].index(name)
    arrays = list(decode)
    arrays[place] = jax.ShapeDtypeStruct(shape, arrays[place].dtype)
    if name == "k_pe":
        arrays[1] = jax.ShapeDtypeStruct((*arrays[1].shape[:-1], shape[-1]), arrays[1].dtype)
    assert says in choice.why_not("mosaic_tpu", DECODE, *arrays)
    assert choice.choose("mla_decode", None, DECODE, *arrays) == "xla"


@pytest.mark.parametrize(("version", "old"), [("0.10.2", True), ("0.11.1.dev20261101", True), ("0.11.2", False),
                                              ("0.11.3rc0", False), ("0.12.0rc1", False), ("0.12.0.1", False)])  # fmt: skip
def test_every_way_to_write_a_version_of_jax_is_understood(monkeypatch, version, old):
    monkeypatch.setattr(jax, "__version__", version)
    assert (choice.too_old() is not None) == old


def test_a_device_that_tuning_does_not_know_gets_the_common_sizes(on):
    on("v5e")
    assert choice.sizes(tuning.MLA_DECODE_TPU)["chunk"] == 512
    on("v6e")
    assert choice.sizes(tuning.MLA_DECODE_TPU) == tuning.MLA_DECODE_TPU["other"]
