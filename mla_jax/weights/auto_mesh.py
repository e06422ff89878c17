"""The mesh that `mesh="auto"` takes, from the number of devices, the config and what fits.

Devices along `data` hold different rows, and so different latents. Devices along `tensor` share the heads of one model but have
the same latents, of which each then has a copy. So there are as many along `data` as the memory of one allows."""

from collections.abc import Callable

from mla_jax.base.axes import DATA, TENSOR, shown_mesh
from mla_jax.base.config import Config
from mla_jax.mesh.comm_cost import Sizes


def choose_mesh(config: Config, count: int, fits: Callable[[Sizes], bool]) -> tuple[dict[str, int], str]:
    """The sizes of the mesh for `count` devices, and why in a sentence; `fits` says whether a mesh has the memory.

    Where none has it takes the one with most devices along `tensor`, on which each has the smallest part of the weights."""
    used = _usable(config, count)
    idle = (
        ""
        if used == count
        else f"; {count - used} of {count} devices have no equal part of {config.n_routed_experts} experts"
    )
    meshes = [
        {DATA: used // n, TENSOR: n}
        for n in range(1, used + 1)
        if used % n == 0 and config.num_attention_heads % n == 0
    ]
    if len(meshes) == 1:
        return meshes[0], f"mesh {shown_mesh(meshes[0])}: {_only(config, used)}{idle}"
    for sizes in meshes:
        if fits(sizes):
            return sizes, f"mesh {shown_mesh(sizes)}: {_why(sizes)}{idle}"
    sizes = meshes[-1]
    return (
        sizes,
        f"mesh {shown_mesh(sizes)}: nothing fits these devices; here each has the smallest part of the weights{idle}",
    )


def _usable(config: Config, count: int) -> int:
    """The most devices that have equal parts of the routed experts."""
    return next(n for n in range(count, 0, -1) if (config.n_routed_experts or 0) % n == 0)


def _only(config: Config, used: int) -> str:
    if used == 1:
        return "there is one device that can be used"
    return f"{config.num_attention_heads} heads have no equal parts on these devices; no latent is held twice"


def _why(sizes: Sizes) -> str:
    if sizes[TENSOR] == 1:
        return "each device has the latents of its own rows, and no latent is held twice"
    smaller = f"with less along tensor the weights of a device and its cache do not fit; {sizes[TENSOR]} devices each"
    return f"{smaller} copy the latents of their rows"
