"""Descriptions of arrays and calls for the manifest of an export."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mla_jax.decode import rows
from mla_jax.decode.outputs import CHOSEN, LIKELY

CALLING = (
    "A program is called as program(weights, kept, sent), and returns a flat list of arrays.",
    "weights: a tuple of all arrays in `weights`, in this order, each laid out on the mesh by its `sharding`.",
    "kept: a list of the arrays that `kept` names; all begin as zeros. They are donated, and returned first, in the same order.",
    "sent: one array of int32 that has all arrays of `sent`, flattened, one after the other; floats and uint32 keep their bits, a"
    " bool is 0 or 1. On a mesh it has an axis of data shards in front, by which it is cut: each has its own rows and pages.",
    "A `sharding` names the mesh axes that cut each dimension; where `mesh` has one device there is none.",
    "Each shard has `rows` rows and `pages` pages. Page table entries are pages of `page` tokens, for all layers the same.",
    "admit: gives the rows `at` to requests; an index from `rows` on is none. A field that nobody sets has its `fill`.",
    "prefill: reads `counts` of the `tokens` of one row behind those that it holds. `at` is the row, or an index from `rows` on.",
    "run: chooses up to `steps` more tokens for each of the rows `at`. `chosen` is [rows of all shards, packed `fields`], and"
    " each device has all of it. Of `tokens` the first `count` are new; a row that is `done` has ended.",
)


def fields(sent: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arrays that are sent to a program, in this order."""
    found = []
    for argument, tree in sent.items():
        for name, array in names({argument: tree}).items():
            found.append(described(name, array) | _fill(name))
    return found


def returned(name: str, exported: Any, kept: int) -> list[dict[str, Any]]:
    """The arrays that a program returns behind those that are kept."""
    if name != "run":
        return []
    kinds = {"chosen": CHOSEN, "likely": LIKELY}
    found = []
    for (of, like), array in zip(kinds.items(), exported.out_avals[kept:], strict=True):
        packed = [
            {"name": one, "shape": list(value.shape[1:]), "dtype": value.dtype.name}
            for one, value in like._asdict().items()
        ]
        found.append({"name": of, "shape": list(array.shape), "dtype": array.dtype.name, "fields": packed})
    return found


def names(tree: Any) -> dict[str, Any]:
    """All arrays of a tree, by where they are in it: for weights the parameter's path, and which part of a packed one."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = {}
    for path, array in leaves:
        keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
        found[".".join(key for key in keys if key not in ("value", "parts"))] = array
    assert len(found) == len(leaves), "two arrays have one name"
    return found


def described(name: str, array: Any) -> dict[str, Any]:
    found = {"name": name, "shape": list(array.shape), "dtype": jnp.dtype(array.dtype).name}
    sharding = getattr(array, "sharding", None)
    if sharding is None:
        return found
    cuts: list[list[str]] = [[] for _ in array.shape]
    for dimension, cut in enumerate(sharding.spec):
        if cut is not None:
            cuts[dimension] = [cut] if isinstance(cut, str) else list(cut)
    return found | {"sharding": cuts}


def _fill(name: str) -> dict[str, Any]:
    """The value of an entry's field that nobody sets."""
    blank = names({"entry": rows.default_entries(1)})
    return {"fill": blank[name].reshape(-1)[0].item()} if name in blank else {}
