"""mla-convert SOURCE OUT: parses the arguments, then plans, writes and verifies the conversion; or exports a model."""

import os
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from convert import programs_command
from mla_jax.base.errors import BadRequest, MlaJaxError, Unsupported, printable

if TYPE_CHECKING:
    from convert.plan import Plan
    from convert.tensors import Job
    from mla_jax.weights.load import Checkpoint

INTERRUPTED = 130
OUTPUTS = {"orbax": "an Orbax folder", "hf": "a Hugging Face folder", "gguf": "a GGUF file"}
OF_GGUF = ("keep", "bf16", "f32", "f16", "q8_0", "q4_0")
OF_GGUF_ALONE = ("f16", "q8_0", "q4_0")
USAGE = """examples:
  mla-convert ./DeepSeek-V3 ./v3                       keeps FP8
  mla-convert ./DeepSeek-V3 ./v3 --mesh data=8         cuts the weights for eight devices
  mla-convert ./model-Q4_K_M.gguf ./model              keeps GGUF blocks
  mla-convert ./v3 ./hf --to hf                        back to safetensors, bit for bit
  mla-convert ./v3 ./v3.gguf --to gguf --dtype q8_0    for llama.cpp
  mla-convert export ./v3 ./programs                   programs that run without mla-jax; export --help"""


@dataclass(frozen=True)
class Options:
    """Convert a checkpoint of a DeepSeek-style model to Orbax, to a Hugging Face folder, or to a GGUF file.

    After Ctrl-C, a kill or a full disk, run the same command again: it resumes."""

    source: tyro.conf.Positional[str]
    """Folder of safetensors (Hugging Face, or DeepSeek's own parts), GGUF file, or output of this command."""
    out: tyro.conf.Positional[str] = ""
    """Folder to create; with --to gguf the file."""
    to: Literal["orbax", "hf", "gguf"] = "orbax"
    """Output format."""
    dtype: Literal[
        "keep", "bf16", "f32", "fp8", "int8", "q4_k", "int4_g32", "int4_g128", "f16", "q8_0", "q4_0"
    ] = "keep"
    """Number format; keep leaves every tensor unchanged. fp8 to int4_g128 quantise the matrices of linear layers. GGUF files
    hold bf16, f32, f16, q8_0 and q4_0, and f16 to q4_0 are in these alone."""
    mesh: str = ""
    """Mesh of the devices that will load it, such as data=4,tensor=2: each device then reads only its part."""
    dry_run: bool = False
    """Print the plan; write nothing."""
    verify: bool = False
    """Only verify SOURCE, an output of this command."""
    allow_nonfinite: bool = False
    """Also convert weights with NaN or infinity."""
    debug: bool = False
    """Show the traceback of an error."""


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong usage, 3 bad file, 4 does not fit, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parsed(arguments)
    exports = isinstance(options, programs_command.ExportOptions)
    try:
        return programs_command.run(options) if exports else run(options)
    except MlaJaxError as error:
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stopped:
        starts_anew = exports or options.to == "gguf"
        done = "nothing is left" if starts_anew else "run the same command again to resume"
        print(str(stopped) or f"stopped: {done}", file=sys.stderr)
        return INTERRUPTED


def _parsed(arguments: list[str]) -> Options | programs_command.ExportOptions:
    config = (tyro.conf.FlagCreatePairsOff,)
    if arguments[:1] == ["export"]:
        name = "mla-convert export"
        return tyro.cli(programs_command.ExportOptions, args=arguments[1:], prog=name, config=config)
    return tyro.cli(Options, args=arguments, prog="mla-convert", config=config, description=_help())


def _help() -> str:
    return f"{Options.__doc__}\n\n{USAGE}"


def run(options: Options) -> int:
    if sys.byteorder != "little":
        raise Unsupported(
            "this machine is big-endian", "checkpoints are little-endian, and mla-convert does not swap bytes"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"  # a conversion needs no accelerator
    from convert.plan import share_heap
    from convert.progress import Bar
    from mla_jax.weights.hub import resolve

    _refuse(options)
    share_heap()
    source = resolve(options.source)
    if options.verify:
        _verify(source, Bar("verifying"))
        return 0
    out = Path(os.path.abspath(Path(options.out).expanduser()))
    return _convert(options, source, out)


def _refuse(options: Options) -> None:
    """Raises BadRequest for options that do not go together, Unsupported if the package they need is missing."""
    if options.verify:
        return
    if not options.out:
        raise BadRequest("no OUT given", "mla-convert SOURCE OUT; see mla-convert --help")
    if options.to != "orbax" and options.mesh:
        raise BadRequest(f"{OUTPUTS[options.to]} is not cut for a mesh", "leave --mesh out")
    if options.to != "gguf":
        if options.dtype in OF_GGUF_ALONE:
            raise BadRequest(
                f"{OUTPUTS[options.to]} is not written in {options.dtype}", "give --to gguf, too"
            )
        return
    if options.dtype not in OF_GGUF:
        raise BadRequest(f"a GGUF file is not written in {options.dtype}", f"known: {', '.join(OF_GGUF)}")
    if not options.out.endswith(".gguf"):
        raise BadRequest(f"{printable(options.out, 200)} is no name of a GGUF file", "it ends in .gguf")
    if find_spec("gguf") is None:
        raise Unsupported(
            "a GGUF file is written by the package gguf, which is missing",
            'in the checkout: pip install ".[gguf]"',
        )


def _convert(options: Options, source: Path, out: Path) -> int:
    from convert import export
    from convert.plan import check_paths
    from convert.progress import Bar
    from mla_jax.base.axes import parse_mesh
    from mla_jax.weights.load import Checkpoint

    mesh = parse_mesh(options.mesh)
    check_paths(Path(os.path.abspath(source)), out)
    checkpoint = Checkpoint(source)
    if options.to == "hf":
        return export.run(checkpoint, out, options.dtype, options.dry_run, options.allow_nonfinite)
    if options.to == "gguf":
        from convert import export_gguf

        name = _name(options.source, source)
        return export_gguf.run(checkpoint, out, name, options.dtype, options.dry_run, options.allow_nonfinite)
    _to_orbax(checkpoint, out, mesh, options)
    if not options.dry_run:
        _verify(out, Bar("verifying"))
    return 0


def _name(given: str, source: Path) -> str:
    """The name of the model, as it was given: a snapshot of the Hub lies in a folder named by its commit."""
    from mla_jax.weights.hub import HubName

    name = None if Path(given).expanduser().exists() else HubName.of(given)
    if name is not None:
        return name.repository.rpartition("/")[2]
    return source.stem if source.is_file() else Path(os.path.abspath(source)).name


def _to_orbax(checkpoint: "Checkpoint", out: Path, mesh: dict[str, int], options: Options) -> None:
    """Prints the plan; unless it is a dry run, writes the weights."""
    from convert import write
    from convert.plan import plan
    from convert.progress import Bar

    planned = plan(checkpoint, out, options.dtype, mesh)
    if options.dry_run:
        _say(planned)
        return
    with write.lock(out):
        target = write.writer(out, planned.metadata(), planned)
        planned = plan(checkpoint, out, options.dtype, mesh, frozenset(target.tensors))
        _say(planned)
        planned.refuse()
        start, bar = time.monotonic(), Bar("writing")

        def progress(done: int, total: int, job: "Job") -> None:
            bar(done, total, _where(planned, job.layer))

        write.write(planned, target, progress, options.allow_nonfinite)
        bar.close(time.monotonic() - start)


def _say(planned: "Plan") -> None:
    print(*planned.lines(), sep="\n", file=sys.stderr, flush=True)


def _where(planned: "Plan", layer: int | None) -> str:
    return "embedding" if layer is None else f"layer {layer + 1} of {planned.layers}"


def _verify(folder: Path, bar) -> None:
    from convert.verify import verify
    from mla_jax.base.limits import gib

    start, shown = time.monotonic(), printable(str(folder), 200)
    try:
        total = verify(folder, bar)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped: {shown} is complete, and mla-convert {shown} --verify checks it again"
        ) from None
    bar.close(time.monotonic() - start)
    print(f"{shown} is sound: {gib(total)}", file=sys.stderr)


def script() -> None:
    sys.exit(main())


if __name__ == "__main__":
    script()
