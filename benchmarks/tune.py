"""Searches for better sizes than those of pallas_kernels/tuning.py on this GPU.

    python benchmarks/tune.py MLA_DECODE_FEW
    python benchmarks/tune.py RAGGED_DOT/bf16/144 MLA_PREFILL --out tuned.json

Candidates and the present entry are timed interleaved on the op's benchmark rows, because a clock drifts. A candidate that does
not compile, or whose error is more than twice the present one's, is refused. One that is more than 1 % faster over all rows is
printed as an entry of tuning.py."""

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import kernels  # noqa: F401  (sets XLA's flags)
import report
from ops import mla_decode, mla_prefill, moe_decode, ragged_dot, timing

from pallas_kernels import choice, tuning
from pallas_kernels.ragged_dot.plan import best_width

# A table and keys into it -> candidates; of a dict only the changes. All compile for an H200, grouped matmuls with 384 experts,
# and hardly spill, except 64 columns with 32 queries (160 to 200 bytes). Registers must fit the total of a launch, and rings must
# hold a full tile: else the kernel would deadlock.
CANDIDATES = {
    ("MLA_DECODE", 512): [{"registers": pair} for pair in ((80, 176), (88, 168), (104, 152))],
    ("MLA_DECODE_FEW", 512): [
        {"slots": (6, 5, 5, 5)},
        {"width": 64, "slots": (12, 11, 10, 10)},
        {"registers": (232, 40)},
    ],
    ("MLA_DECODE_FEW_FP8", 512): [
        {"slots": (8, 8, 2, 2)},
        {"width": 64, "slots": (16, 16, 5, 3)},
    ],
    ("MLA_PREFILL", (192, 128)): [
        {"chunk": 64, "slots": 3},
        {"chunk": 64, "slots": 4},
        {"near": 2},
        {"near": 6},
        {"registers": (232, 232, 40)},
    ],
    ("MLA_PREFILL", (256, 256)): [{"near": 2}, {"near": 8}, {"registers": (232, 232, 40)}],
    ("RAGGED_DOT", "bf16", 8): [(5, 64), (3, 128)],
    ("RAGGED_DOT", "bf16", 16): [(5, 64), (3, 128)],
    ("RAGGED_DOT", "bf16", 32): [(4, 64), (2, 128)],
    ("RAGGED_DOT", "bf16", 64): [(4, 64), (2, 128)],
    ("RAGGED_DOT", "bf16", 144): [
        (3, 64, 56, 80, 104, 128, 136),
        (4, 64, 72, 104, 128, 136),
        (2, 128, 56, 80, 104, 128, 136),
    ],
    ("RAGGED_DOT", "w8", 8): [(5, 128), (4, 128)],
    ("RAGGED_DOT", "w8", 16): [(5, 128), (4, 128)],
    ("RAGGED_DOT", "w8", 32): [(4, 128)],
    ("RAGGED_DOT", "w8", 64): [(3, 128)],
    ("RAGGED_DOT", "w8a8", 8): [(5, 128), (4, 128)],
    ("RAGGED_DOT", "w8a8", 16): [(5, 128), (4, 128)],
    ("RAGGED_DOT", "w8a8", 32): [(4, 128)],
    ("RAGGED_DOT", "w8a8", 64): [(4, 128)],
    ("RAGGED_DOT", "w8a8", 96): [(3, 128, 56, 72, 88), (4, 128, 72, 88)],
    ("MOE_DECODE",): [
        {"slots": (5, 10)},
        {"slots": (6, 8)},
        {"slots": (6, 12)},
        {"depth": 64, "slots": (12, 20)},
        {"depth": 64, "slots": (13, 24)},
        {"depth": 256, "slots": (3, 5)},
        {"depth": 256, "slots": (3, 6)},
    ],
}  # fmt: skip
LEAST = 1.01  # speedup over all rows from which a candidate is recommended
LIMIT = 0.01  # of any error

Works = Iterator[tuple[str, timing.Work]]


def _titled(shape: tuple) -> str:
    return " x ".join(map(str, shape))


def _decode(rank: int) -> Works:
    shapes = [at for at in mla_decode.BARS if at[1] > tuning.MLA_DECODE_MOST]
    return ((_titled(at), mla_decode.Shape(*at).work()) for at in shapes)


def _decode_few(rank: int, packed: bool = False) -> Works:
    """Also other numbers of queries than the benchmark's, because each has its own slots."""
    shapes = [at for at in mla_decode.BARS if at[1] <= tuning.MLA_DECODE_MOST]
    shapes += [
        (64, heads, 4096)
        for heads in range(8, tuning.MLA_DECODE_MOST + 1, 8)
        if heads not in {at[1] for at in shapes}
    ]
    return ((_titled(at), mla_decode.Shape(*at, packed).work()) for at in shapes)


def _prefill(widths: tuple[int, int]) -> Works:
    return ((_titled(shape), mla_prefill.work(shape)) for shape in mla_prefill.SHAPES if shape[4:6] == widths)


def _ragged(kind: str, width: int) -> Works:
    shapes = [
        shape
        for shape in ragged_dot.SHAPES
        if best_width(shape[1], shape[0], tuning.RAGGED_DOT[kind]) == width
    ]
    for shape in shapes:
        inputs = ragged_dot.held(ragged_dot.random_inputs(shape), kind)
        for op, names in ragged_dot.OPERANDS.items():
            yield f"{op.__name__} {_titled(shape)}", ragged_dot.work(op, shape, kind, inputs, names)


def _moe() -> Works:
    made = {}
    for shape in moe_decode.SHAPES:
        if shape[2:] not in made:
            made = {shape[2:]: moe_decode.weights(shape)}
        yield _titled(shape), moe_decode.work(shape, made[shape[2:]])


WORKS: dict[str, Callable[..., Works]] = {
    "MLA_DECODE": _decode,
    "MLA_DECODE_FEW": _decode_few,
    "MLA_DECODE_FEW_FP8": lambda rank: _decode_few(rank, packed=True),
    "MLA_PREFILL": _prefill,
    "RAGGED_DOT": _ragged,
    "MOE_DECODE": _moe,
}


def text(value: Any) -> str:
    """As in tuning.py."""
    return repr(value).replace("'", '"')


def label(address: tuple) -> str:
    return "/".join(",".join(map(str, key)) if isinstance(key, tuple) else str(key) for key in address)


def present(address: tuple) -> Any:
    name, *keys = address
    entry = getattr(tuning, name)
    for key in keys:
        entry = entry[key]
    return entry


def entries(address: tuple) -> list:
    """The present entry, then every candidate that differs from it, as full entries."""
    now = present(address)
    others = [now | change if isinstance(now, dict) else change for change in CANDIDATES[address]]
    return [now, *(entry for entry in others if entry != now)]


def _replaced(table: Any, keys: list, entry: Any) -> Any:
    return table | {keys[0]: _replaced(table[keys[0]], keys[1:], entry)} if keys else entry


@contextlib.contextmanager
def standing(address: tuple, entry: Any) -> Iterator[None]:
    """Puts `entry` into its table meanwhile, and clears JAX's caches of programs with other entries."""
    name, *keys = address
    before = getattr(tuning, name)
    setattr(tuning, name, _replaced(before, keys, entry))
    jax.clear_caches()
    try:
        yield
    finally:
        setattr(tuning, name, before)
        jax.clear_caches()


@dataclasses.dataclass
class Trial:
    """An entry on one row: its times in microseconds, its error, or why it is refused."""

    entry: Any
    program: Any = None
    times: list[float] = dataclasses.field(default_factory=list)
    error: float = 0.0
    refused: str = ""

    @property
    def us(self) -> float:
        return statistics.median(self.times)

    def attempt(self, do: Callable, *args) -> None:
        """Calls `do` unless refused; any exception refuses the entry."""
        if self.refused:
            return
        try:
            do(*args)
        except Exception as fault:
            self.refuse(f"{type(fault).__name__}: {fault}")

    def refuse(self, reason: str) -> None:
        self.refused, self.program = " ".join(reason.split())[:200], None

    def compile(self, address: tuple, work: timing.Work, build: Callable) -> None:
        with standing(address, self.entry):
            self.program = build(work)

    def time(self) -> None:
        self.times.append(self.program.microseconds())

    def check(self, work: timing.Work) -> None:
        self.error = work.error(self.program.out())

    def row(self, address: tuple, shape: str) -> dict:
        row = {"entry": label(address), "row": shape, "candidate": text(self.entry)}
        return row | ({"refused": self.refused} if self.refused else {"us": self.us, "error": self.error})


def compare(address: tuple, entries: list, work: timing.Work, rounds: int, build: Callable) -> list[Trial]:
    """Times all entries on one row, interleaved; the first is the present one, which must not fail."""
    trials = [Trial(entry) for entry in entries]
    for trial in trials:
        trial.attempt(trial.compile, address, work, build)
    for _ in range(rounds):
        for trial in trials:
            trial.attempt(trial.time)
    for trial in trials:
        trial.attempt(trial.check, work)
    limit = min(LIMIT, 2 * trials[0].error)
    for trial in trials:
        if not trial.refused and not trial.error <= limit:
            trial.refuse(f"its error is {trial.error:.2g}, the limit is {limit:.2g}")
    if trials[0].refused:
        raise RuntimeError(f"the present entry is refused: {trials[0].refused}")
    return trials


def search(
    address: tuple,
    works: Iterable[tuple[str, timing.Work]],
    rounds: int,
    build: Callable = timing.Work.program,
) -> tuple[list[dict], Any, float]:
    """The rows of a table, the best entry, and its speedup over the present one."""
    left, rows, ratios = entries(address), [], {}
    for shape, work in works:
        trials = compare(address, left, work, rounds, build)
        for trial in trials:
            rows.append(trial.row(address, shape))
            print(rows[-1], flush=True)
        left = [trial.entry for trial in trials if not trial.refused]
        for trial in trials:
            if not trial.refused:
                ratios.setdefault(text(trial.entry), []).append(trials[0].us / trial.us)
    gains = [statistics.geometric_mean(ratios[text(entry)]) for entry in left]
    best = gains.index(max(gains))
    return (rows, left[best], gains[best]) if gains[best] > LEAST else (rows, left[0], 1.0)


def verdict(address: tuple, entry: Any, gain: float) -> str:
    if gain == 1:
        return f"{label(address)}: stays"
    name, *keys = address
    line = f"    {text(keys[-1])}: {text(entry)}," if keys else f"{name} = {text(entry)}"
    return f"{label(address)}: {100 * (gain - 1):.1f} % faster with\n{line}"


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    labels = {label(address): address for address in CANDIDATES}
    parser.add_argument(
        "entries", nargs="+", metavar="ENTRY", help=f"tables, or entries of them: {', '.join(labels)}"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timings of each candidate (5)")
    options = parser.parse_args()
    chosen = {name: [at for at in labels if f"{at}/".startswith(f"{name}/")] for name in options.entries}
    if unknown := [name for name, found in chosen.items() if not found]:
        parser.error(f"no entry {', '.join(unknown)}")
    if reason := choice.why_not("mosaic_gpu", {"mosaic_gpu": choice.too_old}):
        parser.error(reason)
    rows, verdicts = [], []
    for address in (labels[at] for at in dict.fromkeys(at for found in chosen.values() for at in found)):
        try:
            found, entry, gain = search(address, WORKS[address[0]](*address[1:]), options.rounds)
        except Exception as fault:  # the other entries continue
            verdicts.append(f"{label(address)}: {type(fault).__name__}: {fault}")
        else:
            rows += found
            verdicts.append(verdict(address, entry, gain))
        print(verdicts[-1], flush=True)
    report.show(rows, options.out, benchmark="tune", verdicts=verdicts)
    print("\n".join(verdicts))


if __name__ == "__main__":
    main()
