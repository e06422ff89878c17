"""mla-convert export MODEL OUT: parses the arguments, opens the model, and exports it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class ExportOptions:
    """Export a model as programs that run without mla-jax: StableHLO, weights, a manifest, and run.py, which calls them."""

    model: tyro.conf.Positional[str]
    """Folder of safetensors, GGUF file, or output of mla-convert."""
    out: tyro.conf.Positional[str]
    """Folder to create."""
    prompt: int = 256
    """Prompt tokens that one call reads."""
    rows: int = 8
    """Requests at a time, on each data shard."""
    context: int | None = None
    """Most tokens of prompt and output together; the model's, at most 4,096, unless given."""
    platforms: tuple[Literal["cpu", "cuda", "tpu"], ...] = ()
    """Platforms, which need not be here; this machine's unless given."""
    mesh: str = ""
    """Mesh of the devices, which need not be here, such as data=4,tensor=2."""
    dtype: str | None = None
    """Number format of weights that are not quantised, such as bfloat16; float32 on a CPU unless given."""
    device: str | None = None
    """With --programs-only: the kind of device, which need not be here, such as h200."""
    kernels: bool = False
    """Take the kernels of this machine's device, on which alone the programs then run."""
    programs_only: bool = False
    """Write no weights, and load none: the model need not fit this machine."""
    debug: bool = False
    """Show the traceback of an error."""


def run(options: ExportOptions) -> int:
    from convert.programs import export
    from mla_jax.base.options import Options
    from mla_jax.engine.opening.opened import open_model

    opened = open_model(Options().replace(model=options.model, dtype=options.dtype, device=options.device))
    with nullcontext() if options.programs_only else _bar(opened.name) as progress:
        export(
            opened,
            Path(options.out).expanduser(),
            prompt=options.prompt,
            rows=options.rows,
            context=options.context,
            platforms=options.platforms or None,
            mesh=options.mesh,
            kernels=options.kernels,
            weights=not options.programs_only,
            progress=progress,
        )
    return 0


@contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A function of the bytes loaded and of all bytes, which shows them."""
    from convert.progress import Bar

    start, bar = time.monotonic(), Bar("loading")
    try:
        yield lambda done, total: bar(done, total, name)
    finally:
        bar.close(time.monotonic() - start)
