"""Weights of a trainer, such as float32 masters, in the formats and places of the weights that a model holds.

Numbers are cast or quantised as they are when a checkpoint is converted. Nothing of the model is changed here."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array

from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, Unsupported, shortened, shown
from mla_jax.base.qtensor import REORDERED, QTensor, reorder
from mla_jax.model.transformer import Transformer
from mla_jax.weights.quantize import Quantizer, quantizer_of

ByPath = dict[str, Any]  # of parameters, by their paths


def parameters_by_path(model: Transformer) -> dict[str, nnx.Variable]:
    """The parameters of a model by their paths, such as `layers.0.attn.q_a_proj`."""
    return _by_path(nnx.state(model, nnx.Param))


def as_held(model: Transformer, weights: Any) -> ByPath:
    """New arrays of `weights`, a state of the tree of `nnx.state(trainable(model), nnx.Param)`, as `model` holds its own.

    On the host are the numbers of one matrix while it is quantised. Raises BadRequest for another tree, for arrays of other
    shapes, and for numbers that are not finite in their new format; Unsupported for formats that are only read."""
    held = {path: variable.get_raw_value() for path, variable in parameters_by_path(model).items()}
    given = _values(weights)
    _refuse_other_names(held, given)
    _refuse([fault for path in held if (fault := _fault(path, given[path], held[path]))])
    quantizers = _quantizers(held, model.config)
    _refuse_unsound(held, given)
    return {path: _as_held(given[path], value, quantizers) for path, value in held.items()}


def _by_path(state: Any) -> dict[str, Any]:
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def _values(weights: Any) -> ByPath:
    if not isinstance(weights, nnx.State):
        raise BadRequest(
            f"weights are {shown(weights)}, expected an nnx.State",
            "nnx.state(llm.trainable(), nnx.Param) has the tree",
        )
    leaves = _by_path(weights).items()
    return {path: leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf for path, leaf in leaves}


def _refuse_other_names(held: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    missing = [f"missing: {path}" for path in held if path not in given]
    unknown = [f"not of this model: {path}" for path in given if path not in held]
    if missing or unknown:
        raise BadRequest(
            "the weights are not those of llm.trainable()",
            *shortened(missing + unknown),
            "give all of nnx.state(llm.trainable(), nnx.Param)",
        )


def _fault(path: str, new: Any, held: Any) -> str | None:
    """The difference of a new array to numbers of the shape of those that are held."""
    if not isinstance(new, jax.Array | np.ndarray):
        return f"{path} is a {type(new).__name__}, expected an array"
    if isinstance(new, Tracer):
        return f"{path} is traced: give weights outside of jax.jit"
    if isinstance(new, jax.Array) and new.is_deleted():
        return f"{path} is deleted: it was donated to a program"
    if new.shape != held.shape or not jnp.issubdtype(new.dtype, jnp.floating):
        return f"{path} is {new.dtype} {list(new.shape)}, expected floating-point numbers {list(held.shape)}"
    return None


def _refuse(faults: list[str]) -> None:
    if faults:
        raise BadRequest("weights do not fit the model", *shortened(faults))


def _quantizers(held: Mapping[str, Any], config: Config) -> dict[str, Quantizer]:
    """By format. Raises Unsupported with a parameter of each format that is only read."""
    found: dict[str, Quantizer] = {}
    faults: dict[str, str] = {}
    for path, value in held.items():
        if isinstance(value, QTensor) and value.format not in found | faults:
            try:
                found[value.format] = quantizer_of(_stored(value.format), config.quantization_config)
            except Unsupported as e:
                faults[value.format] = f"{path} is in {value.format}; {e.args[-1]}"
    if faults:
        raise Unsupported(
            f"weights cannot be quantised to {', '.join(faults)}",
            *shortened(list(faults.values())),
            'open the model with dtype="bfloat16"',
        )
    return found


def _stored(format: str) -> str:
    return format.removesuffix(REORDERED)


def _refuse_unsound(held: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    dtypes = {
        path: jnp.dtype("float32") if isinstance(value, QTensor) else value.dtype
        for path, value in held.items()
    }
    finite = {path: [_is_finite(w, dtype) for w in _shards(given[path])] for path, dtype in dtypes.items()}
    if faulty := [path for path, flags in jax.device_get(finite).items() if not all(flags)]:
        raise BadRequest("weights hold NaN or infinity", *shortened(faulty))


def _shards(w: Any) -> list[Any]:
    """The parts of an array, each looked at where it is: devices have nothing to tell each other."""
    if isinstance(w, np.ndarray):
        return [w]
    return [shard.data for shard in w.addressable_shards if shard.replica_id == 0]


@partial(jax.jit, static_argnames="dtype")
def _is_finite(w: Any, dtype: Any) -> Array:
    return jnp.isfinite(w.astype(dtype)).all()


def _as_held(new: Any, held: Any, quantizers: Mapping[str, Quantizer]) -> Any:
    """One after the other is waited for: on simulated devices exchanges under way keep the threads of others."""
    if isinstance(held, QTensor):
        return jax.block_until_ready(_quantized(new, held, quantizers[held.format]))
    return jax.block_until_ready(_copied(jax.device_put(new, held.sharding), held.dtype))


@partial(jax.jit, static_argnames="dtype")
def _copied(w: Array, dtype: Any) -> Array:
    """A copy even in its own dtype: the trainer may donate its arrays."""
    return jnp.array(w, dtype, copy=True)


def _quantized(new: Any, held: QTensor, quantizer: Quantizer) -> QTensor:
    """Matrices of a stack are quantised one after the other."""
    stacked = len(held.shape) == 3
    parts = [quantizer(np.asarray(w, np.float32)) for w in (new if stacked else [new])]
    joined = tuple(np.stack(some) for some in zip(*parts, strict=True)) if stacked else parts[0]
    found = QTensor(_stored(held.format), joined, held.shape)
    found = _reordered(found) if held.reordered else found
    return jax.tree.map(lambda part, like: jax.device_put(part, like.sharding), found, held)


_reordered = jax.jit(reorder)
