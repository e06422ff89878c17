"""Times the kernels and their peers on a Hopper GPU, and checks their results there.

    python benchmarks/kernels.py --check
    python benchmarks/kernels.py --out kernels_h200.json

A time is wall time per call, of many calls back to back in one program, over rotating inputs that exceed the L2. `--peer` takes
JSON lines with kind, batch, heads_q, seqlen_k, us and peer, as peer_flashinfer.py writes them; measure both in the same run."""

import importlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.85")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=2"
)

import report

OPS = (
    "mla_decode",
    "heads_decode",
    "mla_sparse",
    "mla_prefill",
    "moe_decode",
    "ragged_dot",
    "quantized_matmul",
    "rope_append",
    "router",
)


def peers(path: Path | None) -> dict[tuple, dict[str, float]]:
    """Microseconds by op and shape, then by the peer's name."""
    found: dict[tuple, dict[str, float]] = {}
    for record in map(json.loads, path.read_text().splitlines() if path else ()):
        if "us" in record:
            op = "mla_prefill" if record.get("kind") == "prefill" else "mla_decode"
            shape = record["batch"], record["heads_q"], record["seqlen_k"]
            found.setdefault((op, *shape), {})[record["peer"]] = record["us"]
    return found


def check(ops: Iterable) -> int:
    """Prints a line for every case; returns 1 if one failed."""
    failed = 0
    for op in ops:
        for line in op.check():
            print(line, flush=True)
            failed |= line.startswith("FAIL")
    return failed


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS, metavar="OP", help=", ".join(OPS))
    parser.add_argument("--check", action="store_true", help="check every named case instead of timing")
    parser.add_argument("--peer", type=Path, help="JSON lines of peers, measured in the same run")
    options = parser.parse_args()
    ops = (importlib.import_module(f"ops.{name}") for name in options.ops)
    if options.check:
        raise SystemExit(check(ops))
    rows, known = [], peers(options.peer)
    for op in ops:
        for row in op.rows(known):
            print(row, flush=True)
            rows.append(row)
    report.show(rows, options.out, benchmark="kernels")


if __name__ == "__main__":
    main()
