"""The weights of a model as its programs take them: one flat tuple, flattened once and compared once a call."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from mla_jax.base.errors import BadRequest
from mla_jax.base.qtensor import QTensor
from mla_jax.decode.program_sharding import Spread
from mla_jax.model.transformer import Transformer


class Weights:
    """`flat` are the arrays of all parameters, in the order of `structure`. All programs of a model share them.

    To flatten an `nnx.State` takes milliseconds, and programs are called often."""

    def __init__(self, model: Transformer):
        """Of a model, or of its shapes, whose arrays `take` brings later."""
        self.dtype, self.spread = model.dtype, Spread.of(model)
        self.take(model)

    def take(self, model: Transformer) -> None:
        """The arrays of a model of the same shapes."""
        self.graph, self.state = nnx.split(model)
        self.structure = jax.tree.structure(self.spread.local(self.state))
        found = jax.tree_util.tree_leaves_with_path(
            self.state, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
        self._names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in found]
        self._parameters = [parameter for _, parameter in found]
        self._values = [parameter.get_raw_value() for parameter in self._parameters]
        self.flat: tuple[jax.Array, ...] = tuple(jax.tree.leaves(self._values))

    def local_model(self) -> Transformer:
        """The model as one device has it; where several do, of shapes."""
        return nnx.merge(self.graph, self.spread.local(self.state))

    @property
    def changed(self) -> list[int]:
        """Parameters that were set since `refresh` looked last, by number."""
        pairs = zip(self._parameters, self._values, strict=True)
        return [i for i, (parameter, value) in enumerate(pairs) if parameter.get_raw_value() is not value]

    def refresh(self) -> bool:
        """Takes the parameters as the model has them now; whether any has changed.

        Arrays of the host, or of other devices, are put where the earlier ones are. Raises BadRequest for a parameter of another
        shape, dtype or format; the earlier ones stay in use then."""
        placed = {i: self._placed(i) for i in self.changed}
        for i, value in placed.items():
            self._parameters[i].set_raw_value(value)
            self._values[i] = value
        if placed:
            self.flat = tuple(jax.tree.leaves(self._values))
        return bool(placed)

    def _placed(self, i: int) -> Any:
        """The new value of a parameter, on the devices of the earlier one."""
        new, old = self._parameters[i].get_raw_value(), self._values[i]
        if _described(new) != _described(old):
            raise BadRequest(
                f"the model's parameter {self._names[i]} was set to {_described(new)}, expected {_described(old)}",
                "programs are compiled for one shape, dtype and format; convert the new value to these",
            )
        return jax.tree.map(_at, new, old)


def _at(new: Any, old: jax.Array) -> jax.Array:
    is_there = isinstance(new, jax.Array) and new.sharding.is_equivalent_to(old.sharding, old.ndim)
    return new if is_there else jax.device_put(new, old.sharding)


def _described(value: Any) -> str:
    """Dtype and shape of an array, or format, shape and parts of a packed tensor."""
    if isinstance(value, QTensor):
        return f"{value.format} {list(value.shape)} in parts of {', '.join(map(_described, value.parts))}"
    is_array = isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    return f"{value.dtype} {list(value.shape)}" if is_array else f"a {type(value).__name__}"
