"""The demo model on this device with each feature: its tokens beside those without, greedy, and what it takes.

    python benchmarks/features.py --out features.json
    python benchmarks/features.py --dtype float32 --only "draft mtp" "draft lookup"
    python benchmarks/features.py --small          (fewer and shorter prompts)

Each feature runs in a process of its own, `--jobs` at a time. Prompts are pieces of this project's own code, short and long, in
one call, and then once more, when the prefix index knows them. Numbers of bfloat16 depend on the size of a batch, so greedy
tokens may part at a near tie; with float32 they are the same where a feature is exact."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import report

from mla_jax import LLM, SamplingParams

FEATURES: dict[str, dict[str, Any]] = {
    "none": {"draft": "off"},
    "draft mtp": {"draft": "mtp"},
    "draft lookup": {"draft": "lookup"},
    "naive": {"draft": "off", "attention": "naive"},
    "compressed": {"draft": "off", "attention": "compressed"},
    "absorbed": {"draft": "off", "attention": "absorbed"},
    "kv_cache fp8": {"draft": "off", "kv_cache": "fp8"},
    "retrieve all": {"draft": "off", "retrieve": "quest", "retrieve_tokens": 4096},
    "quest": {"draft": "off", "retrieve": "quest", "retrieve_tokens": 1024},
    "infllm": {"draft": "off", "retrieve": "infllm", "retrieve_tokens": 1024},
    "snapkv": {"draft": "off", "evict": "snapkv", "evict_keep": 0.5},
    "h2o": {"draft": "off", "evict": "h2o", "evict_keep": 0.5},
    "experts host": {"draft": "off", "experts": "host"},
    "host cache": {"draft": "off", "host_cache": 1.0, "cache_tokens": 16384},
}
FIRST = next(iter(FEATURES))
CODE = Path(__file__).parents[1] / "mla_jax"
JOBS = 4
POOL = 65536  # tokens: several processes share the device
SIZES = ((12, 300, 64), (4, 8000, 48))  # prompts, characters of each, and tokens of an answer
SMALL = ((2, 100, 8), (1, 400, 8))


def prompts(sizes: tuple) -> tuple[list[str], list[SamplingParams]]:
    code = "".join(file.read_text() for file in sorted(CODE.rglob("*.py")))
    texts, params = [], []
    for count, characters, tokens in sizes:
        for index in range(count):
            at = 20_000 * (index + 1)
            texts.append(code[at : at + characters])
            params.append(SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0))
    return texts, params


def measured(name: str, dtype: str | None, sizes: tuple) -> dict:
    """One feature, in this process."""
    start = time.perf_counter()
    settings = {"cache_tokens": POOL} | FEATURES[name]
    with LLM(None, dtype=dtype, **settings) as llm:
        texts, params = prompts(sizes)
        first = [answer.token_ids for answer in llm.generate(texts, params, progress=False)]
        ready = time.perf_counter() - start
        start = time.perf_counter()
        again = [answer.token_ids for answer in llm.generate(texts, params, progress=False)]
        seconds = time.perf_counter() - start
        return {
            "tokens": first,
            "again": again,
            "first time, s": ready,
            "again, s": seconds,
            "temporaries, GiB": llm._programs.temporaries / 2**30,
        }


def in_a_process(name: str, options: list[str]) -> dict:
    command = [sys.executable, __file__, "--feature", name, *options]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if "float32" in options:  # for equal tokens, not for speed: no matmul is tuned
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    return json.loads(done.stdout.splitlines()[-1])


def beside(found: dict, plain: dict, name: str) -> dict:
    """A row of the table."""
    if "failed" in found:
        print(f"{name} failed:\n{found['failed']}", flush=True)
        return {"feature": name, "answers as without": "failed"}
    row = {"feature": name}
    if "tokens" in plain:
        row["answers as without"] = equal(found["tokens"], plain["tokens"])
    row["as the first time"] = equal(found["again"], found["tokens"])
    return row | {key: found[key] for key in ("first time, s", "again, s", "temporaries, GiB")}


def equal(these: list, those: list) -> str:
    """How many answers have the same tokens, and how many tokens stand before the first difference in all."""
    same = sum(a == b for a, b in zip(these, those, strict=True))
    tokens = sum(agreed(a, b) for a, b in zip(these, those, strict=True))
    return f"{same} of {len(these)}, {tokens} of {sum(map(len, those))} tokens"


def agreed(these: list[int], those: list[int]) -> int:
    parts = (index for index, (a, b) in enumerate(zip(these, those, strict=True)) if a != b)
    return next(parts, len(these))


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FEATURES, default=list(FEATURES))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes at a time")
    parser.add_argument("--small", action="store_true", help="fewer and shorter prompts")
    parser.add_argument("--feature", choices=FEATURES, help="measure this one, in this process")
    options = parser.parse_args()
    sizes = SMALL if options.small else SIZES
    if options.feature:
        print(json.dumps(measured(options.feature, options.dtype, sizes)))
        return
    passed_on = ["--small"] * options.small + (["--dtype", options.dtype] if options.dtype else [])
    names = list(dict.fromkeys([FIRST, *options.only]))
    rows, plain = [], {}
    with ThreadPoolExecutor(options.jobs) as pool:
        measuring = pool.map(lambda name: in_a_process(name, passed_on), names)
        for name, found in zip(names, measuring, strict=True):
            plain = plain or found
            rows.append(beside(found, plain, name))
            print(rows[-1], flush=True)
    report.show(rows, options.out, benchmark="features", dtype=options.dtype, small=options.small)


if __name__ == "__main__":
    main()
