"""How tokens reach the experts that they have chosen, which are shared by all devices of a mesh.

Each device computes what its own experts make of tokens; the sums over devices are the layer's. Devices of one data shard have
the same tokens. Outside of a mesh nothing is exchanged."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mla_jax.base.axes import CONTEXT, DATA, MESH_AXES, TENSOR
from mla_jax.mesh import across
from mla_jax.model.ops import zeros_after

Compute = Callable[
    [Array, Array, Array], Array
]  # (x [n D], topk_ids [n K], topk_weights [n K]) -> [n D] of this device's experts
Exchange = Callable[[Array, Array, Array, int, Compute], Array]


def by_gathering(
    x: Float[Array, "n D"],
    topk_ids: Int[Array, "n K"],
    topk_weights: Float[Array, "n K"],
    experts: int,
    compute: Compute,
) -> Float[Array, "n D"]:
    """All-gathers the tokens of the data shards and reduce-scatters the outputs: for small batches.

    A device has `experts` experts; the number of all experts is the id of none."""
    x, topk_ids, topk_weights = across.gathered_as_one((x, topk_ids, topk_weights), DATA)
    y = compute(x, own_ids(topk_ids, experts), topk_weights)
    return across.total(across.scattered(y, DATA), (TENSOR, CONTEXT))


def own_ids(topk_ids: Int[Array, "n K"], experts: int) -> Int[Array, "n K"]:
    """The ids counted from this device's first expert; `experts` for experts of other devices."""
    if across.size(MESH_AXES) == 1:
        return topk_ids
    here = topk_ids - across.index(MESH_AXES) * experts
    return jnp.where((here >= 0) & (here < experts), here, experts)


def by_all_to_all(
    x: Float[Array, "n D"],
    topk_ids: Int[Array, "n K"],
    topk_weights: Float[Array, "n K"],
    experts: int,
    compute: Compute,
) -> Float[Array, "n D"]:
    """Each token goes to the devices that have its experts, once to each, and their sums come back: for many tokens.

    Devices of one data shard each send their share of its tokens."""
    if across.size(MESH_AXES) == 1:
        return compute(x, topk_ids, topk_weights)
    of_shard, nobody = (TENSOR, CONTEXT), across.size(MESH_AXES) * experts
    mine = _shared(x, of_shard), _shared(topk_ids, of_shard, filler=nobody), _shared(topk_weights, of_shard)
    sums = _sent_and_back(*mine, experts, compute)
    return across.gathered(sums, of_shard)[: x.shape[0]]


def _sent_and_back(
    x: Float[Array, "n D"],
    topk_ids: Int[Array, "n K"],
    topk_weights: Float[Array, "n K"],
    experts: int,
    compute: Compute,
) -> Float[Array, "n D"]:
    """The expert outputs of this device's tokens: each goes to the devices of its experts, and the sums come back."""
    (tokens, chosen), devices = topk_ids.shape, across.size(MESH_AXES)
    goes = (topk_ids[:, :, None] // experts == jnp.arange(devices)).any(1)
    route = across.Route.of(goes.sum(0, dtype=jnp.int32), MESH_AXES)
    outbox = Outbox.of(goes, tokens * min(devices, chosen))
    joined, apart = across.as_one((x, topk_ids, topk_weights))
    room = devices * tokens  # all may come to one device
    there, ids, weights = apart(across.sent(joined[outbox.token], route, tokens, room))
    is_token = jnp.arange(room)[:, None] < route.received
    y = compute(there, jnp.where(is_token, own_ids(ids, experts), experts), weights)
    back = across.sent(y, route.back(), tokens, outbox.token.size)
    return outbox.added_up(back).astype(back.dtype)


class Outbox(NamedTuple):
    """The rows that a device sends: one for each device that a token goes to, one device's rows after the other's."""

    token: Int[Array, " S"]  # of each row
    place: Int[Array, "n N"]  # of a token's row for each device; S where it does not go there

    @staticmethod
    def of(goes: Bool[Array, "n N"], rows: int) -> "Outbox":
        """For tokens that go to some devices; `rows` are as many as there can be."""
        tokens, devices = goes.shape
        place = jnp.cumsum(goes.T.reshape(-1)).reshape(devices, tokens).T - 1
        place = jnp.where(goes, place, rows)
        token = jnp.zeros(rows, jnp.int32).at[place].set(jnp.arange(tokens)[:, None], mode="drop")
        return Outbox(token, place)

    def added_up(self, y: Float[Array, "S D"]) -> Float[Array, "n D"]:
        """The sum of each token's rows, in float32, one device after the other: all at once would be `[n N D]`."""

        def with_next(device: Array, sums: Array) -> Array:
            place = self.place[:, device]
            return sums + jnp.where((place < y.shape[0])[:, None], y.at[place].get(mode="clip"), 0)

        tokens, devices = self.place.shape
        nothing = zeros_after(self.place[0, 0], (tokens, y.shape[1]), jnp.float32)
        return jax.lax.fori_loop(0, devices, with_next, nothing)


def _shared(array: Array, axes: tuple[str, ...], filler: int = 0) -> Array:
    """This device's share of what all along these axes have; the last shares are filled up."""
    padding = [(0, -array.shape[0] % across.size(axes))] + [(0, 0)] * (array.ndim - 1)
    return across.own(jnp.pad(array, padding, constant_values=filler), axes)


EXCHANGES: dict[str, Exchange] = {"gather": by_gathering, "all_to_all": by_all_to_all}
