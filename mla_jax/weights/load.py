"""Opens a checkpoint as a model on the device: names resolved, shapes checked, then tensor by tensor from file to device.

Host memory holds the few tensors in flight; FP8 blocks are multiplied out on the device."""

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from mla_jax.base import roofline
from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, Unsupported, printable, shortened
from mla_jax.model.transformer import Transformer
from mla_jax.weights import names
from mla_jax.weights.safetensors import Folder, open_folder

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3")
Progress = Callable[[int, int], None]
IN_FLIGHT = 3  # tensors read ahead while one is placed


class Checkpoint:
    """An HF folder whose names, shapes and number formats fit the model it describes. Opening it reads headers only."""

    def __init__(self, path: Path, *, attention: str = "auto", experts: str = "auto", dtype: str | None = None):
        """`dtype` None: float32 on a CPU, bfloat16 elsewhere."""
        self.config, self.folder = Config.from_hf(path), open_folder(path)
        self.target = jax.devices()[0]
        device = roofline.device(self.target.device_kind, self.target.platform)
        self.dtype = jnp.dtype(dtype or ("float32" if device.platform == "cpu" else "bfloat16"))
        names.refuse_other_counts(self.config, self.folder.tensors)
        mtp = names.has_mtp(self.config, self.folder.tensors)
        build = partial(Transformer, self.config, attention=attention, experts=experts, device=device, mtp=mtp)
        self.graph, self.state = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
        self.slots = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(self.state)}
        for slot in self.slots.values():
            exact = slot.get_metadata().get("exact")
            slot.set_value(jax.ShapeDtypeStruct(slot.shape, jnp.float32 if exact else self.dtype))
        self.sources = names.resolve(self.slots, self.config, self.folder.tensors)
        quantization = self.config.quantization_config
        self.block = quantization.weight_block_size if quantization else (128, 128)
        for name in dict.fromkeys(name for source in self.sources.values() for name in source.names):
            _check_number_format(name, self.folder, self.block)

    @property
    def abstract(self) -> Transformer:
        """The model without its weights, whose parameters have shapes only."""
        return nnx.merge(self.graph, self.state)

    def bytes(self) -> int:
        """What the weights take on the device."""
        return sum(prod(slot.shape) * slot.dtype.itemsize for slot in self.slots.values())

    def read(self, progress: Progress | None = None) -> Transformer:
        """The model with its weights, on the default device; `progress` hears of the bytes read, and of how many there are."""
        try:
            reader = Reader(self.folder, self.config, self.block)
            _fill(self.slots, self.sources, reader, jax.sharding.SingleDeviceSharding(self.target), progress)
        finally:
            self.folder.close()
        return nnx.merge(self.graph, self.state)


def load(path: str | Path, *, attention: str = "auto", experts: str = "auto", dtype: str | None = None) -> Transformer:
    """The model in an HF folder, on the default device."""
    return Checkpoint(Path(path), attention=attention, experts=experts, dtype=dtype).read()


@dataclass(frozen=True)
class Reader:
    """Tensors of a folder in the order they are asked for, some read ahead."""

    folder: Folder
    config: Config
    block: tuple[int, int]

    def raw(self, name: str) -> tuple[np.ndarray, np.ndarray | None]:
        """A weight as stored, and its block scales if it has any."""
        weight = self.folder.read(name)
        if name + names.SCALE not in self.folder.tensors:
            return weight, None
        scale = self.folder.read(name + names.SCALE).astype(np.float32)
        if not (np.isfinite(scale) & (scale > 0)).all():
            raise BadFile(
                f"{printable(name + names.SCALE)} holds a scale that is not positive and finite", f"it scales {printable(name)}"
            )
        return weight, scale

    def ahead(self, wanted: list[str]) -> Generator[tuple[np.ndarray, np.ndarray | None], None, None]:
        with ThreadPoolExecutor(1) as pool:
            queue, rest = [pool.submit(self.raw, name) for name in wanted[:IN_FLIGHT]], iter(wanted[IN_FLIGHT:])
            while queue:
                ready = queue.pop(0).result()
                queue += [pool.submit(self.raw, name) for name in islice(rest, 1)]
                yield ready


def _fill(
    slots: dict, sources: dict[str, names.Source], reader: Reader, sharding: jax.sharding.Sharding, progress: Progress | None
):
    """Puts every parameter on the device; experts go one by one into a buffer that is updated in place."""
    wanted = [name for source in sources.values() for name in source.names]
    reached = list(accumulate(reader.folder.tensors[name].size for name in wanted))
    finite: list[Array] = []
    with closing(reader.ahead(wanted)) as stream:
        for path, source in sources.items():
            slot = slots[path]
            place = partial(_place, part=source.part, config=reader.config, block=reader.block, dtype=slot.dtype)
            value = jnp.zeros(slot.shape, slot.dtype, device=sharding) if source.stacked else None
            for i, (raw, scale) in enumerate(islice(stream, len(source.names))):
                if source.stacked:
                    value, sound = _insert(value, raw, scale, i, place=place)
                else:
                    value, sound = place(*jax.device_put((raw, scale), sharding), shape=slot.shape)
                finite.append(sound)
                if progress is not None:
                    progress(reached[len(finite) - 1], reached[-1])
                if len(finite) > IN_FLIGHT:  # dispatch is asynchronous, and the host keeps what the device has not taken yet
                    finite[-IN_FLIGHT].block_until_ready()
            slot.set_value(value)
    if faulty := [name for name, sound in zip(wanted, jax.device_get(finite), strict=True) if not sound]:
        raise BadFile(
            "weights hold NaN or infinity",
            *shortened(list(dict.fromkeys(map(printable, faulty)))),
            "the file is damaged, or the model was saved after a failed run",
        )


@partial(jax.jit, static_argnames=("part", "config", "block", "dtype", "shape"))
def _place(
    raw: Array,
    scale: Array | None,
    *,
    part: names.Part,
    config: Config,
    block: tuple[int, int],
    dtype: jnp.dtype,
    shape: tuple[int, ...],
) -> tuple[Array, Array]:
    """A stored tensor as our parameter, and whether all of it is finite."""
    value = raw if scale is None else dequantize(raw, scale, block)
    value = part(value, config).reshape(shape).astype(dtype)
    return value, jnp.isfinite(value).all()


@partial(jax.jit, static_argnames=("place",), donate_argnums=0)
def _insert(stack: Array, raw: Array, scale: Array | None, index: Array, *, place) -> tuple[Array, Array]:
    value, finite = place(raw, scale, shape=stack.shape[1:])
    return jax.lax.dynamic_update_index_in_dim(stack, value, index, 0), finite


def dequantize(weight: Float[Array, "O I"], scale: Float[Array, "o i"], block: tuple[int, int]) -> Float[Array, "O I"]:
    """FP8 times the scale of its block, in float32; the last blocks may be cut by the matrix's edge."""
    rows, columns = (jnp.repeat(jnp.arange(n), b)[:m] for n, b, m in zip(scale.shape, block, weight.shape, strict=True))
    return weight.astype(jnp.float32) * scale[rows[:, None], columns[None, :]]


def _check_number_format(name: str, folder: Folder, block: tuple[int, int]):
    """Refuses weights we cannot read, FP8 without its scales, and scales without FP8 or of the wrong count."""
    tensor, scale = folder.tensors[name], folder.tensors.get(name + names.SCALE)
    if tensor.dtype not in FLOATS:
        raise Unsupported(f"{printable(name)} has dtype {tensor.dtype}", "weights can be " + ", ".join(FLOATS))
    fp8 = tensor.dtype == "F8_E4M3"
    if fp8 and scale is None:
        raise BadFile(f"{printable(name)} is FP8 without scales", f"expected {printable(name + names.SCALE)} beside it")
    if scale is None:
        return
    if not fp8:
        raise BadFile(f"{printable(name + names.SCALE)} scales a weight that is not FP8", f"{printable(name)} is {tensor.dtype}")
    expected = tuple(-(-n // b) for n, b in zip(tensor.shape, block, strict=False))
    if len(tensor.shape) != 2 or scale.shape != expected or scale.dtype not in ("F32", "BF16", "F16", "F8_E8M0"):
        needed = f"{list(tensor.shape)} in blocks of {list(block)} needs {list(expected)} scales"
        found = f"found {scale.dtype} {list(scale.shape)}"
        raise BadFile(f"{printable(name + names.SCALE)} does not fit {printable(name)}", f"{needed}, {found}")
