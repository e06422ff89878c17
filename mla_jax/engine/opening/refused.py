"""What is not computed on some meshes, by the names of the options: one table, read before anything is allocated."""

from collections.abc import Callable

from mla_jax.base.axes import shown_mesh
from mla_jax.base.errors import Unsupported
from mla_jax.base.options import Options
from mla_jax.mesh.partition import Layout

Condition = Callable[[Options, Layout], bool]

EXPERTS_ON_HOST = (
    "experts on the host are not available on a mesh with tensor or context",
    "devices along these axes have the same tokens; take a mesh of data alone, or one with more devices",
)
# When it is refused, what, and what to do instead.
REFUSED: tuple[tuple[Condition, str, str], ...] = (
    (
        lambda options, layout: options.retrieval.retrieve != "off" and layout.context > 1,
        "retrieve",
        "a page is cut over context, and pages are chosen whole; leave context out of the mesh",
    ),
    (
        lambda options, layout: options.eviction.evict != "off" and layout.context > 1,
        "evict",
        "a row's tokens are cut over context, and those to drop are chosen among all; leave context out of the mesh",
    ),
    (
        lambda options, layout: options.memory.host_cache > 0 and layout.devices > 1,
        "host_cache",
        "pages in the host's memory are those of one device; leave it out",
    ),
    (
        lambda options, layout: options.experts.experts == "host" and layout.tensor * layout.context > 1,
        'experts="host"',
        "devices along tensor and context have the same tokens; take a mesh of data alone",
    ),
    (
        lambda options, layout: _evicts_heads(options) and layout.tensor > 1,
        'evict with attention="naive"',
        "heads are cut over tensor, and share out what is kept; leave tensor out of the mesh, or take another form",
    ),
    (
        lambda options, layout: _fused_over_fp8(options) and layout.context > 1,
        'attention="fused" with kv_cache="fp8"',
        'that kernel attends to whole pages; take attention="auto", or leave context out of the mesh',
    ),
)


def refuse_on_mesh(options: Options, layout: Layout) -> None:
    """Raises Unsupported for options that cannot be had on this mesh."""
    for condition, what, advice in REFUSED:
        if condition(options, layout):
            raise Unsupported(f"{what} is not available on the mesh {shown_mesh(layout.sizes)}", advice)


def _evicts_heads(options: Options) -> bool:
    return options.eviction.evict != "off" and options.attention.attention == "naive"


def _fused_over_fp8(options: Options) -> bool:
    return options.attention.attention == "fused" and options.attention.kv_cache == "fp8"
