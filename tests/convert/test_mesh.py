"""--mesh: a chunk holds one device's part, and devices get equal values."""

import os
import subprocess
import sys
import textwrap

import pytest
from checkpoints import assert_same_model, convert, released

from mla_jax.weights.orbax_store import open_store

# shape, and the chunk on data=4,tensor=2; blocks of 16 x 24 are not parted, so that some matrices stay whole
CHUNKS = {
    "embed": ((96, 48), (48, 48)),
    "head": ((96, 48), (48, 48)),
    "norm": ((48,), (48,)),
    "layers.0.mlp.gate": ((80, 48), (80, 48)),
    "layers.0.mlp.down": ((48, 80), (48, 80)),
    "layers.1.attn.q_a_proj": ((24, 48), (24, 48)),
    "layers.1.attn.q_b_proj": ((96, 24), (48, 24)),
    "layers.1.attn.kv_a_proj": ((40, 48), (40, 48)),
    "layers.1.attn.kv_b_proj": ((128, 32), (64, 32)),
    "layers.1.attn.o_proj": ((48, 64), (48, 64)),
    "layers.1.mlp.router.weight": ((8, 48), (8, 48)),
    "layers.1.mlp.router.bias": ((8,), (8,)),
    "layers.1.mlp.experts.up": ((8, 24, 48), (1, 24, 48)),
    "layers.1.mlp.experts.down": ((8, 48, 24), (1, 48, 24)),
    "layers.1.mlp.shared.up": ((24, 48), (24, 48)),
}
SCALES = {"layers.1.mlp.experts.up": ((8, 2, 2), (1, 2, 2)), "layers.1.attn.o_proj": ((3, 3), (3, 3))}


@pytest.mark.deep
def test_chunks_are_the_parts_of_devices(tmp_path):
    source = released(tmp_path / "hf", "v3", "fp8")
    assert convert(source, tmp_path / "out", "--mesh", "data=4,tensor=2") == 0
    tensors = open_store(tmp_path / "out").tensors
    assert {name: (tensors[name].parts[0].shape, tensors[name].parts[0].chunk) for name in CHUNKS} == CHUNKS
    assert {name: (tensors[name].parts[1].shape, tensors[name].parts[1].chunk) for name in SCALES} == SCALES
    assert_same_model(source, tmp_path / "out")


def test_what_does_not_divide_stays_whole(tmp_path):
    source = released(tmp_path / "hf", "v3")
    assert convert(source, tmp_path / "out", "--mesh", "data=3,tensor=7") == 0
    assert all(part.chunk == part.shape for entry in open_store(tmp_path / "out").tensors.values() for part in entry.parts)


RESTORE = """
    import sys
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from pathlib import Path
    from mla_jax.weights import orbax_store
    from mla_jax.weights.orbax_store import open_store
    read, sound = [], orbax_store._sound
    orbax_store._sound = lambda *chunk: read.append(chunk) or sound(*chunk)
    store = open_store(Path(sys.argv[1]))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("tensor", "expert"))
    specs = {"embed": P("tensor"), "layers.1.mlp.router.bias": P("expert"), "layers.1.mlp.experts.up": P("expert", "tensor")}
    specs |= {"layers.1.attn.o_proj": P(None, "tensor"), "norm": P(), "layers.1.mlp.experts.down": P("expert", None, "tensor")}
    for name, spec in specs.items():
        (expected,) = store.read(name)
        read.clear()
        (found,) = store.restore(name, (NamedSharding(mesh, spec),))
        assert [chunk[2].leaf for chunk in read] == [c.leaf for c in store.tensors[name].parts[0].chunks(name, 0)], name
        assert found.sharding.spec == spec and len(found.addressable_shards) == 8
        for shard in found.addressable_shards:
            assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes(), (name, shard.index)
    print("equal on", len(jax.devices()))
"""


@pytest.mark.deep
def test_eight_devices_get_equal_values_and_read_each_chunk_once(tmp_path):
    source = released(tmp_path / "hf", "v3", "bf16")
    assert convert(source, tmp_path / "out", "--mesh", "data=4,tensor=2") == 0
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-c", textwrap.dedent(RESTORE), str(tmp_path / "out")]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert ran.stdout == "equal on 8\n", ran.stderr


NONE = ["tensor", "tensor=0", "tensor=-2", "tensor=2,tensor=2", "model=2", "tensor=2;data=4", "=", "tensor=²", "tensor=10000"]


@pytest.mark.parametrize("mesh", NONE)
def test_what_is_no_mesh_is_refused(tmp_path, capfd, mesh):
    source = released(tmp_path / "hf", "v3")
    assert convert(source, tmp_path / "out", "--mesh", mesh) == 2
    assert "is no mesh\n  expected data=N,tensor=N,context=N" in capfd.readouterr().err


def test_a_released_folder_is_not_cut_for_a_mesh(tmp_path, capfd):
    source = released(tmp_path / "hf", "v3")
    assert convert(source, tmp_path / "out", "--to", "hf", "--mesh", "tensor=2") == 2
    assert "not cut for a mesh" in capfd.readouterr().err
