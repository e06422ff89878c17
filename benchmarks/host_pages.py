"""The second turn of a chat, whose beginning is in the pool, in the host's memory, or must be read again; random weights.

    python benchmarks/host_pages.py --out host_pages.json
    python benchmarks/host_pages.py --held 4096 32768
    python benchmarks/host_pages.py --small            (a tiny model, on a CPU: does the script work?)

A turn is --new tokens behind --held tokens of the turn before. Milliseconds are from its submission to its first token, the best
of some runs, with nothing else to do. The pool has room for one chat only: another one leaves no page of it there. GiB/s are of
pages that are copied with nothing else to do, until the host has them, or the pool."""

import time
from collections.abc import Iterator

import jax
import report
from drive import Bench, Scale
from engine import FULL, SMALL

from mla_jax.cache.paged import PAGE
from mla_jax.engine.core.size import Size

RUNS = 3
COPIED = 256  # pages of which the rates are measured, if the pool has so many


def bench_of(scale: Scale, held: int, new: int) -> Bench:
    """A pool for one chat, and room on the host for two."""
    tokens = held + new + 2
    pages = -(-tokens // PAGE) + 1
    size = Size(
        rows=1, pages=pages, context=pages * PAGE, chunk=min(scale.size.chunk, pages * PAGE), hosted=2 * pages
    )
    bench = Bench(scale._replace(size=size))
    bench.engine.warm_up()
    return bench


def first_token_seconds(bench: Bench, prompt: list[int]) -> float:
    start = time.perf_counter()
    job = bench.submit(prompt, 1, streams=True)
    while job.times.first is None:
        bench.engine.step()
    seconds = job.times.first - start
    bench.finish()
    return seconds


def second_turn(bench: Bench, held: int, new: int, where: str) -> float:
    """Seconds, where the first turn's pages are `where`."""
    first = bench.prompt(held)
    if where != "nowhere":
        bench.serve([first], [1])
    if where == "host":
        bench.serve([bench.prompt(held + new)], [1])
    stats = bench.engine.stats
    before = stats.pages_in
    seconds = first_token_seconds(bench, first + bench.prompt(new))
    assert (stats.pages_in > before) == (where == "host"), "the pages were not where they were meant to be"
    return seconds


def rates(bench: Bench) -> tuple[float, float]:
    """GiB/s from the pool to the host, and back."""
    bench.engine.reset()
    tier, (pool, _) = bench.engine.device.tier, bench.engine.device.state()
    assert tier is not None
    pages = range(min(COPIED, bench.size.pages))
    size, found = len(pages) * tier.store.page_bytes / 2**30, []
    for run in range(RUNS + 1):  # the first one takes the memory from the system
        digests = [bytes([run]) + page.to_bytes(4, "little") for page in pages]
        jax.block_until_ready(pool)
        start = time.perf_counter()
        for digest, page in zip(digests, pages, strict=True):
            tier.forget(digest, page)
        pool = tier.settle(pool)
        tier.finish()
        middle = time.perf_counter()
        for digest, page in zip(digests, pages, strict=True):
            tier.ask(digest, page)
        pool = jax.block_until_ready(tier.settle(pool))
        found.append((middle - start, time.perf_counter() - middle))
    bench.engine.reset()  # the pool was given away
    out, back = (min(seconds) for seconds in zip(*found[1:], strict=True))
    return size / out, size / back


def measured(scale: Scale, helds: list[int], new: int) -> Iterator[dict]:
    for held in helds:
        bench = bench_of(scale, held, new)
        places = {"pool": "in the pool, ms", "host": "on the host, ms", "nowhere": "read again, ms"}
        found = {
            name: [second_turn(bench, held, new, place) for _ in range(RUNS)]
            for place, name in places.items()
        }
        out, back = rates(bench)
        row = {"tokens held": held, **{name: 1e3 * min(seconds) for name, seconds in found.items()}}
        yield row | {
            "to the host, GiB/s": out,
            "from the host, GiB/s": back,
            "KiB a token": bytes_a_token(bench) / 1024,
        }


def bytes_a_token(bench: Bench) -> float:
    return sum(one.size * one.dtype.itemsize for one in bench.programs.page.values()) / PAGE


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--held", type=int, nargs="+", default=[1024, 4096, 16_384, 65_536], help="tokens of the first turn"
    )
    parser.add_argument("--new", type=int, default=64, help="tokens of the second turn")
    parser.add_argument("--small", action="store_true", help="a tiny model and a short chat")
    options = parser.parse_args()
    scale, helds, new = (SMALL, [256], 16) if options.small else (FULL, options.held, options.new)
    rows = []
    for row in measured(scale, helds, new):
        rows.append(row)
        print(row, flush=True)
    report.show(rows, options.out, benchmark="host_pages", small=options.small, new=new)


if __name__ == "__main__":
    main()
