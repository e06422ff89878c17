"""One device's part of a model, for the cost model: counted from the model's own parameters, which may be shapes only."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mla_jax.base import qtensor
from mla_jax.base.config import Config
from mla_jax.base.qtensor import BY_COLUMN, QTensor
from mla_jax.base.roofline import Device
from mla_jax.cache.paged import OF_INDEX, PAGE
from mla_jax.mesh.comm_cost import Sizes
from mla_jax.mesh.cost import HELD, PREDICTED_ROWS, MeshCost, Parts, WeightSize
from mla_jax.mesh.partition import Layout
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.fp8_up import stays_fp8
from mla_jax.model.ops import Shapes
from mla_jax.model.transformer import Transformer

KINDS = ("attention", "heads", "dense", "shared", "router", "experts", "embedding", "head")
JOINING, REST = "guess", "mtp"  # of layers for drafts: the projection of two joined vectors, and all else


def cost_of(model: Transformer) -> MeshCost:
    """The cost of passes of a model with weights, or of one device's part of it without any, with all experts on the devices."""
    return MeshCost(parts_of(model), model.dispatch.device)


def parts_of(model: Transformer) -> Parts:
    """The weights of one device by kind, how it attends, and what it caches."""
    found: dict[str, list[WeightSize]] = {kind: [] for kind in (*KINDS, JOINING, REST)}
    for path, value in _values(model):
        found[_kind(model, path)].append(_weights(value))
    kinds = {kind: _sum(found[kind]) for kind in KINDS}
    if model.head is None:
        kinds |= {"head": kinds["embedding"], "embedding": WeightSize()}
    layers = len(model.layers)
    parts = Parts(
        config=model.config,
        sizes=model.dispatch.layout.sizes,
        weights=kinds,
        layers=layers,
        moe_layers=sum(model.config.is_moe(i) for i in range(layers)),
        itemsize=model.dtype.itemsize,
        latent=token_bytes(model),
        indexers=sum(model.config.has_indexer(i) for i in range(layers)),
        index_key=_bytes_in_layer(model, index=True),
        chunk=model.dispatch.chunk(model),
        forms=_forms(model),
        exchange=model.dispatch.exchange,
    )
    return (
        parts
        if not model.mtp
        else dataclasses.replace(parts, guess=_guess(model, parts, _sum(found[JOINING])))
    )


def _guess(model: Transformer, parts: Parts, joining: WeightSize) -> Parts:
    """One layer for multi-token prediction, which joins two vectors of the model's width first."""
    found: dict[str, list[WeightSize]] = {kind: [] for kind in parts.weights}
    for path, value in _values(model.mtp[0].block):
        found[_kind_in_layer(path)].append(_weights(value))
    kinds = {kind: _sum(each) for kind, each in found.items()}
    joined = _sum([kinds["attention"], WeightSize(*(part / len(model.mtp) for part in joining))])
    kinds |= {"attention": joined, "head": parts.weights["head"]}
    is_moe = int(model.config.is_moe(parts.layers))
    indexers = int(model.config.has_indexer(parts.layers))
    return dataclasses.replace(parts, weights=kinds, layers=1, moe_layers=is_moe, indexers=indexers)


def _forms(model: Transformer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The forms that steps over few and over many new tokens of a row pick among."""
    chunk = model.dispatch.chunk(model)
    return model.dispatch.forms(model, PREDICTED_ROWS, 1, HELD), model.dispatch.forms(model, 1, chunk, chunk)


def page_bytes(model: Transformer, layers: int | None = None) -> int:
    """Bytes of one page on one device, in all layers or in as many."""
    pool = jax.eval_shape(lambda: model.new_pool(1, layers=layers))
    return sum(a.size * a.dtype.itemsize for a in pool.values())


def token_bytes(model: Transformer) -> float:
    """Bytes that a token leaves in a layer for its attention, of the heads of one device."""
    return _bytes_in_layer(model, index=False) * model.dispatch.layout.context


def _bytes_in_layer(model: Transformer, index: bool) -> float:
    """Bytes that a token leaves in a layer on one device: for its attention, or for its `index`."""
    pool = jax.eval_shape(lambda: model.new_pool(1, layers=1))
    return sum(a.size * a.dtype.itemsize for name, a in pool.items() if (name in OF_INDEX) == index) / PAGE


def packed_shapes(model: Transformer) -> list[tuple[int, ...]]:
    """The shapes of the weights that stay packed, a half of kv_b_proj as one matrix."""
    packed = [(path, value.shape) for path, value in _values(model) if isinstance(value, QTensor)]
    return [(math.prod(shape[:-1]), shape[-1]) if _is_half(path) else shape for path, shape in packed]


def unpacked_bytes(model: Transformer) -> dict[str, int]:
    """Bytes of weights, by format, that XLA unpacks before every product: packed ones in a file's order.

    Of an embedding rows are looked up, and these alone are unpacked; codes of kv_b_proj are converted inside the product."""
    found: dict[str, int] = {}
    for path, value in _values(model):
        as_they_are = _is_half(path) or _kind(model, path) == "embedding"
        if isinstance(value, QTensor) and not value.reordered and not as_they_are:
            found[value.format] = found.get(value.format, 0) + value.nbytes
    return found


def _values(module: nnx.Module) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The parameters of a module by their paths; copies of experts that a CPU holds are none."""
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if "axes" in variable.get_metadata():
            yield path, variable.get_value()


def _kind(model: Transformer, path: tuple[Any, ...]) -> str:
    if path[0] == "layers":
        return _kind_in_layer(path[2:])
    if path[0] == "mtp":
        return JOINING if path[2] == "eh_proj" else REST
    return {"embed": "embedding", "norm": "attention"}.get(path[0], "head")


def _is_half(path: tuple[Any, ...]) -> bool:
    """Whether a parameter is a half of kv_b_proj."""
    return path[-1] in ("uk", "uv")


def _kind_in_layer(path: tuple[Any, ...]) -> str:
    if path[0] != "mlp":
        return "heads" if _is_half(path) else "attention"
    return path[1] if path[1] in ("shared", "router", "experts") else "dense"


def _weights(value: Any) -> WeightSize:
    """Numbers and bytes of one device's part; parameters without values have its shape already."""
    leaves = jax.tree.leaves(value)
    own, every = sum(map(_own_bytes, leaves)), sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return WeightSize(math.prod(value.shape) * own / every, own)


def _own_bytes(leaf: Any) -> int:
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def _sum(each: list[WeightSize]) -> WeightSize:
    return WeightSize(sum(part.numbers for part in each), sum(part.bytes for part in each))


def released(
    config: Config, device: Device, sizes: Sizes | None = None, mtp: bool = False, packed: bool = True
) -> Transformer:
    """One device's part of a model on a mesh of these sizes as it is released, without weights: in FP8 if its config says so and
    it stays `packed`, else in bfloat16, on a CPU in float32."""
    dispatch = Dispatch(device=device, layout=Layout(**(sizes or {})))
    graph, state = nnx.split(Transformer(config, Shapes(), dispatch=dispatch, mtp=mtp))
    format = _released_format(config) if packed else None
    dtype = jnp.dtype("float32" if device.platform == "cpu" else "bfloat16")

    def part(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        data, shape = variable.get_metadata(), variable.get_value().shape
        packs = data["packs"] and path[0] not in ("embed", "head")
        plain = jax.ShapeDtypeStruct(shape, jnp.float32 if data["exact"] else dtype)
        whole = qtensor.abstract(format, shape) if format and packs else plain
        if format and data["role"] == "heads" and stays_fp8(format, config):
            whole = qtensor.abstract(BY_COLUMN, shape)
        return variable.replace(dispatch.layout.local(data["axes"], whole))

    flat = [(path, part(path, variable)) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _released_format(config: Config) -> str | None:
    found = config.quantization_config
    if found is None or found.weight_block_size is None:
        return None
    rows, columns = found.weight_block_size
    return "fp8_block" if (rows, columns) == (128, 128) else f"fp8_block_{rows}x{columns}"
