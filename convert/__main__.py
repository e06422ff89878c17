"""mla-convert SOURCE OUT: parses, then plans, writes and verifies."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from mla_jax.base.errors import BadRequest, MlaJaxError, Unsupported, printable

if TYPE_CHECKING:
    from convert.plan import Plan

INTERRUPTED = 130
USAGE = """examples:
  mla-convert ./DeepSeek-V3 ./v3                       FP8 as it is, for one machine
  mla-convert ./DeepSeek-V3 ./v3 --mesh tensor=8       in parts that eight devices load one each
  mla-convert ./model-Q4_K_M.gguf ./model              GGUF blocks as they are
  mla-convert ./v3 ./hf --to hf                        back to safetensors, bit for bit"""


@dataclass(frozen=True)
class Options:
    """Convert a checkpoint of a DeepSeek-style model to Orbax, or to a Hugging Face folder.

    Ctrl-C, a kill or a full disk lose nothing: the same command goes on where it was."""

    source: tyro.conf.Positional[str]
    """Folder of safetensors (released, or DeepSeek's own parts), GGUF file, or what this command wrote before."""
    out: tyro.conf.Positional[str] = ""
    """Folder to make."""
    to: Literal["orbax", "hf"] = "orbax"
    """Format to write."""
    dtype: Literal["keep", "bf16", "f32", "int8"] = "keep"
    """Number format; keep leaves every tensor as it is."""
    mesh: str = ""
    """Devices that will load it, as tensor=4,expert=2: each reads its own part alone."""
    dry_run: bool = False
    """Print the plan, write nothing."""
    verify: bool = False
    """Only check SOURCE, a folder that this command wrote."""
    allow_nonfinite: bool = False
    """Convert weights that hold NaN or infinity, too."""
    debug: bool = False
    """Show the traceback of an error."""


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 usage, 3 bad file, 4 does not fit, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = tyro.cli(Options, args=arguments, prog="mla-convert", config=(tyro.conf.FlagCreatePairsOff,), description=_help())
    try:
        return run(options)
    except MlaJaxError as error:
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stopped:
        print(str(stopped) or "stopped; run the same command again, and it goes on from here", file=sys.stderr)
        return INTERRUPTED


def _help() -> str:
    return f"{Options.__doc__}\n\n{USAGE}"


def run(options: Options) -> int:
    if sys.byteorder != "little":
        raise Unsupported("this machine is big-endian", "checkpoints are little-endian, and are not swapped here")
    os.environ["JAX_PLATFORMS"] = "cpu"  # a conversion leaves the accelerators to others
    from convert.plan import share_heap
    from convert.progress import Bar
    from mla_jax.weights.hub import resolve

    share_heap()
    source = resolve(options.source)
    if options.verify:
        _verify(source, Bar("verifying"))
        return 0
    if not options.out:
        raise BadRequest("no OUT given", "mla-convert SOURCE OUT; mla-convert --help says more")
    out = Path(os.path.abspath(Path(options.out).expanduser()))
    return _convert(options, source, out)


def _convert(options: Options, source: Path, out: Path) -> int:
    from convert import export, write
    from convert.plan import check_paths, parse_mesh, plan
    from convert.progress import Bar
    from mla_jax.weights.load import Checkpoint

    mesh = parse_mesh(options.mesh)
    check_paths(Path(os.path.abspath(source)), out)
    checkpoint = Checkpoint(source)
    if options.to == "hf" and mesh:
        raise BadRequest("a Hugging Face folder is not cut for a mesh", "leave --mesh out")
    if options.to == "hf":
        return export.run(checkpoint, out, options.dtype, options.dry_run, options.allow_nonfinite)
    planned = plan(checkpoint, out, options.dtype, mesh)
    if options.dry_run:
        _say(planned)
        return 0
    with write.lock(out):
        target = write.writer(out, planned.metadata(), planned)
        planned = plan(checkpoint, out, options.dtype, mesh, frozenset(target.tensors))
        _say(planned)
        planned.refuse()
        start, bar = time.monotonic(), Bar("writing")
        write.write(
            planned, target, lambda done, total, job: bar(done, total, _where(planned, job.layer)), options.allow_nonfinite
        )
        bar.close(time.monotonic() - start)
    _verify(out, Bar("verifying"))
    return 0


def _say(planned: "Plan") -> None:
    print(*planned.lines(), sep="\n", file=sys.stderr, flush=True)


def _where(planned: "Plan", layer: int | None) -> str:
    return "embedding" if layer is None else f"layer {layer + 1} of {planned.layers}"


def _verify(folder: Path, bar) -> None:
    from convert.verify import verify
    from mla_jax.weights.plan import gib

    start, shown = time.monotonic(), printable(str(folder), 200)
    try:
        total = verify(folder, bar)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {shown} is all there, and mla-convert {shown} --verify checks it again") from None
    bar.close(time.monotonic() - start)
    print(f"{shown} is sound: {gib(total)}", file=sys.stderr)


def script() -> None:
    sys.exit(main())


if __name__ == "__main__":
    script()
