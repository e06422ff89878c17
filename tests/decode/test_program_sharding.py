"""How programs lie on the devices of a mesh."""

from types import SimpleNamespace

import jax
import pytest

from mla_jax.decode.program_sharding import BY_NCCL, Spread


@pytest.fixture
def options(monkeypatch):
    """Of the compiler, for a mesh of so many devices."""

    def found(platform: str, count: int) -> dict:
        monkeypatch.setattr(Spread, "devices", [SimpleNamespace(platform=platform)] * count)
        return Spread().compiler_options

    return found


def test_several_gpus_may_send_ragged_messages_by_nccl(options):
    found = options("gpu", 2)
    assert found in ({BY_NCCL: True}, {})  # XLA of JAX 0.10 has no such switch, and no need of it
    assert bool(found) == (jax.__version_info__ >= (0, 11))
    assert jax.jit(lambda x: x + 1, compiler_options=found)(1) == 2


@pytest.mark.parametrize(("platform", "count"), [("gpu", 1), ("cpu", 2), ("tpu", 2)])
def test_no_others_need_it(options, platform, count):
    assert options(platform, count) == {}
