"""A device's part of each parameter on a mesh: it follows from the names of the parameter's axes, by base/axes.py.

A parameter is cut only into equal parts, and a packed one only between blocks. Parameters without equal parts are replicated;
modules infer it from the local shape."""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from mla_jax.base import axes, qtensor
from mla_jax.base.axes import MESH_AXES, TENSOR, shown_mesh
from mla_jax.base.config import Config
from mla_jax.base.errors import Unsupported
from mla_jax.base.qtensor import QTensor

Cut = tuple[str, ...]  # the mesh axes that cut one dimension


class Layout(NamedTuple):
    """The number of devices along each mesh axis."""

    data: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def devices(self) -> int:
        return prod(self)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(MESH_AXES, self, strict=True))

    def parts(self, cut: Cut) -> int:
        """Parts of a dimension that these mesh axes cut."""
        return prod(self.sizes[axis] for axis in cut)

    def cuts(self, words: tuple[str, ...], value: Any) -> tuple[Cut, ...]:
        """The mesh axes that cut each dimension of a parameter whose axes have these names; () is whole.

        `value` is an array, a QTensor, or a shape of one."""
        return _cuts(self, tuple(words), value.shape, value.format if isinstance(value, QTensor) else None)

    def _divides(self, dimension: int, cut: Cut, value: Any) -> bool:
        """Whether a dimension has equal parts, without a block in two of them."""
        parts, length = self.parts(cut), value.shape[dimension]
        if parts == 1 or length % parts:
            return False
        if not isinstance(value, QTensor):
            return True
        shared = ((1,) * len(value.shape) + qtensor.unit(value.format))[dimension - len(value.shape)]
        return (length // parts) % shared == 0 and self._cut_parts(dimension, parts, value) is not None

    def _cut_parts(self, dimension: int, parts: int, value: QTensor) -> tuple[int | None, ...] | None:
        """The dimension of each part of a packed parameter that is cut with this one, None for a part that stays whole; None if
        the format does not hold such parts."""
        shape = tuple(n // parts if i == dimension else n for i, n in enumerate(value.shape))
        try:
            whole = qtensor.abstract(value.format, value.shape).parts
            one = qtensor.abstract(value.format, shape).parts
        except Exception as e:
            if isinstance(e, qtensor.BadFile):
                return None
            raise
        found: list[int | None] = []
        for a, b in zip(whole, one, strict=True):
            differ = [i for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m]
            if len(differ) > 1 or any(a.shape[i] != parts * b.shape[i] for i in differ):
                return None
            found.append(differ[0] if differ else None)
        return tuple(found)

    def local_shape(self, words: tuple[str, ...], value: Any) -> tuple[int, ...]:
        """The shape of one device's part."""
        return tuple(
            n // self.parts(cut) for n, cut in zip(value.shape, self.cuts(words, value), strict=True)
        )

    def local(self, words: tuple[str, ...], value: Any) -> Any:
        """The shape of one device's part, as a `jax.ShapeDtypeStruct` or a QTensor of these."""
        shape = self.local_shape(words, value)
        if isinstance(value, QTensor):
            return qtensor.abstract(value.format, shape)
        return jax.ShapeDtypeStruct(shape, value.dtype)

    def specs(self, words: tuple[str, ...], value: Any) -> Any:
        """How a parameter is sharded over the mesh: a PartitionSpec, or a QTensor of these."""
        cuts = self.cuts(words, value)
        if not isinstance(value, QTensor):
            return PartitionSpec(*(cut or None for cut in cuts))
        found: list[list[Any]] = [
            [None] * len(part.shape) for part in qtensor.abstract(value.format, value.shape).parts
        ]
        for dimension, cut in enumerate(cuts):
            places = self._cut_parts(dimension, self.parts(cut), value) if cut else ()
            for spec, place in zip(found, places or (), strict=False):
                if place is not None:
                    spec[place] = cut
        return QTensor(value.format, tuple(PartitionSpec(*spec) for spec in found), value.shape)


@lru_cache(maxsize=4096)  # layers are alike, and many ask
def _cuts(
    layout: Layout, words: tuple[str, ...], shape: tuple[int, ...], format: str | None
) -> tuple[Cut, ...]:
    value = jax.ShapeDtypeStruct(shape, "float32") if format is None else QTensor(format, (), shape)
    return tuple(cut if layout._divides(i, cut, value) else () for i, cut in enumerate(axes.partition(words)))


ONE = Layout()


@lru_cache(maxsize=64)
def of_device(config: Config, layout: Layout) -> Config:
    """A model's config as one device's attention sees it, which has its own heads alone."""
    return dataclasses.replace(config, num_attention_heads=config.num_attention_heads // layout.tensor)


def of_parameters(state: Any, of_one: Callable[[tuple[str, ...], Any], Any]) -> Any:
    """A state of a model with `of_one(axes, value)` in the place of each parameter's value; other variables have no axes."""

    def changed(variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_value()
        words = variable.get_metadata().get("axes")
        return variable.replace(of_one(words if words is not None else _no_axes(value), value))

    return jax.tree.map(changed, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _no_axes(value: Any) -> tuple[str, ...]:
    return ("model",) * len(value.shape)


def refuse_uneven(config: Config, layout: Layout) -> None:
    """Raises Unsupported for a mesh on which heads or routed experts have no equal parts, with those that would do."""
    heads, experts = config.num_attention_heads, config.n_routed_experts or 0
    if heads % layout.tensor:
        fitting = ", ".join(f"{TENSOR}={n}" for n in range(1, heads + 1) if heads % n == 0 and n <= 64)
        raise Unsupported(
            f"{heads} heads cannot be shared by {TENSOR}={layout.tensor}", f"they can by {fitting}"
        )
    if experts % layout.devices:
        fitting = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0 and n <= 512)
        found = f"{experts} experts cannot be shared by the {layout.devices} devices of the mesh {shown_mesh(layout.sizes)}"
        raise Unsupported(found, f"they can by {fitting} devices")
