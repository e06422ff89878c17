"""How long the first answer of a large model takes, from the start of the process, and what is compiled after `warm_up`.

    python benchmarks/first_answer.py --out first_answer.json
    python benchmarks/first_answer.py --formats bf16 --small        (a tiny model)

The model has V2-Lite's shape; its weights are zeros, which take no room on the disk. The first start finds no stored programs.
That of the first format then warms up, asks what once was left out (a request behind a cached prompt), and counts the programs.
The second start finds all programs. The request has 256 tokens of prompt and 32 of output. `--home` keeps the stored programs:
other benchmarks find them with HOME set to it."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hollow
import report

FORMATS = ("bf16", "Q4_K")
PROMPT, OUTPUT, HELD = 256, 32, 4096  # tokens


def start(model: str, began: float, warm: bool, small: bool) -> dict:
    """The figures of this process, which began at `began` of the clock."""
    from mla_jax import LLM, SamplingParams

    imported = time.time()
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    with LLM(model) as llm:
        loaded = time.time()
        stream = llm.stream(_prompt(PROMPT), params)
        next(stream)
        first = time.time()
        list(stream)
        figures = {
            "import, s": imported - began,
            "load, s": loaded - imported,
            "first token, s": first - loaded,
            "start to first token, s": first - began,
            "start to last token, s": time.time() - began,
            "programs": llm.stats().compiled,
        }
        if warm:
            figures |= warmed(llm, params, HELD // 8 if small else HELD)
        return figures


def warmed(llm, params, held: int) -> dict:
    """The time of `warm_up`, and whether requests of several kinds find all that they need."""
    began = time.time()
    llm.warm_up()
    figures = {"warm_up, s": time.time() - began, "programs then": llm.stats().compiled}
    prompt = _prompt(held)
    llm.generate([prompt], params, progress=False)
    began = time.time()
    llm.generate([prompt], params, progress=False)
    figures["behind a cached prompt, s"] = time.time() - began
    llm.generate([_prompt(100 + index) for index in range(64)], params, progress=False)
    figures["compiled after warm_up"] = llm.stats().compiled - figures["programs then"]
    return figures


def _prompt(tokens: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    return [10 + (tokens + index) % 200 for index in range(tokens)]


def started(model: Path, home: Path, warm: bool, small: bool) -> dict:
    """The figures of a process whose stored programs are in `home`."""
    command = [sys.executable, __file__, "--start", str(model), "--began", str(time.time())]
    command += ["--warm"] * warm + ["--small"] * small
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"a start ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=(*FORMATS, "fp8"), default=FORMATS)
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--home", type=Path, help="a folder for stored programs; it is kept")
    parser.add_argument("--start", help="measure a start of this model, in this process")
    parser.add_argument("--began", type=float, help="when that process began, seconds of the clock")
    parser.add_argument(
        "--warm", action="store_true", help="with --start: warm up, and count what is compiled then"
    )
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start(options.start, options.began, options.warm, options.small)))
        return
    from loads import FULL, SMALL

    config = (SMALL if options.small else FULL).model
    rows = []
    for format in options.formats:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as temporary:
            home = (options.home or Path(temporary)) / format
            home.mkdir(parents=True)
            model = hollow.write(config, Path(folder), format)
            for stored, warm in (("nothing", format == options.formats[0]), ("all", False)):
                row = {"weights": format, "stored programs": stored}
                rows.append(row | started(model, home, warm, options.small))
                print(rows[-1], flush=True)
    report.show(rows, options.out, benchmark="first_answer", small=options.small)


if __name__ == "__main__":
    main()
