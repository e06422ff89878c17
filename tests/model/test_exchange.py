"""Tokens and the experts that they have chosen, on the devices of a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mla_jax.base.axes import DATA, MESH_AXES, parse_mesh
from mla_jax.mesh import across
from mla_jax.mesh.devices import Devices
from mla_jax.model import grouped, moe
from mla_jax.model.exchange import EXCHANGES

EXPERTS, WIDTH, CHOSEN, TOKENS = 16, 12, 3, 5  # tokens of each data shard
MESHES = ["data=8", "tensor=8", "context=4", "data=4,tensor=2", "data=2,tensor=2,context=2", "data=2"]


def summed(x, ids, weights, numbers):
    """Expert outputs, one token and expert after the other: expert e multiplies by its own numbers."""
    out = np.zeros_like(x)
    for token, expert_ids in enumerate(ids):
        for k, expert in enumerate(expert_ids):
            if expert < EXPERTS:
                out[token] += weights[token, k] * x[token] * numbers[expert]
    return out


def on_device(x, ids, weights, numbers):
    """The same of one device's experts, by matrices."""
    chosen = jax.nn.one_hot(ids, numbers.shape[0]) * weights[..., None]
    return (x * (chosen.sum(1) @ numbers)).astype(x.dtype)


def ragged(rows, into, begins, sizes, ends, comes, axis_name):
    """`jax.lax.ragged_all_to_all` by its documentation, since XLA does not have it on a CPU."""
    here, everything = jax.lax.axis_index(axis_name), jax.lax.all_gather((rows, begins, sizes, ends), axis_name)
    pieces, steps, came = begins.size // everything[0].shape[0], jnp.arange(rows.shape[0]), []
    for rows, begins, sizes, ends in zip(*everything, strict=True):
        for piece in here * pieces + jnp.arange(pieces):
            to = jnp.where(steps < sizes[piece], ends[piece] + steps, into.shape[0])
            into = into.at[to].set(rows.at[begins[piece] + steps].get(mode="clip"), mode="drop")
            came.append(sizes[piece])
    return jnp.where((jnp.stack(came) == comes).all(), into, jnp.nan if into.dtype.kind == "f" else 0)


@pytest.fixture(params=["cpu", "gpu"])
def platform(request, monkeypatch):
    """Whose messages are sent: a GPU's in pieces."""
    if request.param == "gpu":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cuda, **others: cuda(*args))
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged)
        monkeypatch.setattr(across, "EXCHANGE_PIECES", 24)


@pytest.mark.deep
@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("crowded", [False, True], ids=["any", "all choose the same"])
def test_each_token_gets_the_sum_of_its_experts(name, mesh, crowded):
    devices = Devices.of(parse_mesh(mesh))
    rng, tokens = np.random.default_rng(1), TOKENS * devices.sizes[DATA]
    x, weights = rng.normal(size=(tokens, WIDTH)).astype(np.float32), rng.random((tokens, CHOSEN)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(tokens)]).astype(np.int32)
    ids = np.broadcast_to(np.int32([4, 5, 14]), ids.shape).copy() if crowded else ids
    ids[1], ids[-1, 1] = EXPERTS, EXPERTS  # padding, and one expert less
    numbers = rng.normal(size=(EXPERTS, WIDTH)).astype(np.float32)

    def one(x, ids, weights, numbers):
        return EXCHANGES[name](x, ids, weights, numbers.shape[0], functools.partial(on_device, numbers=numbers))

    specs = P(DATA), P(DATA), P(DATA), P(MESH_AXES)
    found = jax.jit(jax.shard_map(one, mesh=devices.mesh, in_specs=specs, out_specs=P(DATA), check_vma=False))
    np.testing.assert_allclose(found(x, ids, weights, numbers), summed(x, ids, weights, numbers), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("crowded", [False, True], ids=["any", "all choose the same"])
def test_a_device_multiplies_by_its_experts_a_block_of_pairs_at_a_time(monkeypatch, crowded):
    """One block of its share at a time; if all choose experts of one device, it has as many blocks as there are devices."""
    monkeypatch.setattr(grouped, "AT_ONCE", 4)
    monkeypatch.setattr(grouped, "ROOM", 1)
    devices, rng, tokens, inner = Devices.of({DATA: 8}), np.random.default_rng(2), 24, 6
    x = rng.normal(size=(tokens, WIDTH)).astype(np.float32)
    ids = np.stack([rng.permutation(2 if crowded else EXPERTS)[:2] for _ in range(tokens)]).astype(np.int32)
    weights = rng.random(ids.shape).astype(np.float32)
    experts = [rng.normal(size=size).astype(np.float32) for size in ((16, inner, WIDTH), (16, inner, WIDTH), (16, WIDTH, inner))]

    def one(x, ids, weights, *experts):
        return EXCHANGES["gather"](x, ids, weights, 2, lambda *some: moe.ragged(*some, tuple(experts)))

    mapped = jax.shard_map(
        one, mesh=devices.mesh, in_specs=(*[P(DATA)] * 3, *[P(MESH_AXES)] * 3), out_specs=P(DATA), check_vma=False
    )
    found, expected = (
        jax.jit(mapped)(x, ids, weights, *experts),
        moe.dense(*map(jnp.asarray, (x, ids, weights)), tuple(map(jnp.asarray, experts))),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_travel_as_one_bit_for_bit(dtype):
    x = jax.random.normal(jax.random.key(0), (4, 6)).astype(dtype)
    given = x, jnp.arange(12, dtype=jnp.int32).reshape(4, 3), jnp.linspace(-1, 1, 4, dtype=jnp.float32)
    joined, apart = across.as_one(given)
    assert joined.shape[0] == 4
    for found, expected in zip(apart(joined[1:]), given, strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected[1:])
