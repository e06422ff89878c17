"""How programs lie on the devices of a mesh."""

from types import SimpleNamespace

import jax
import pytest

from mla_jax.decode.spread import BY_NCCL, Spread


@pytest.fixture
def options(monkeypatch):
    """Of the compiler, for a mesh with a device in each of these processes."""

    def found(platform: str, processes: list[int]) -> dict:
        devices = [SimpleNamespace(platform=platform, process_index=process) for process in processes]
        monkeypatch.setattr(Spread, "devices", devices)
        return Spread().compiler_options

    return found


def test_gpus_of_several_processes_may_send_ragged_messages_by_nccl(options):
    found = options("gpu", [0, 0, 1, 1])
    assert found in ({BY_NCCL: True}, {})  # XLA of JAX 0.10 has no such switch, and no need of it
    assert bool(found) == (jax.__version_info__ >= (0, 11))
    assert jax.jit(lambda x: x + 1, compiler_options=found)(1) == 2


@pytest.mark.parametrize(("platform", "processes"), [("gpu", [0, 0]), ("cpu", [0, 1]), ("tpu", [0, 1])])
def test_no_others_need_it(options, platform, processes):
    assert options(platform, processes) == {}
