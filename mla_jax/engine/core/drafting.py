"""The number of drafts of a dispatch: measured acceptance against the cost of a pass.

Measured is the acceptance rate a_i of each draft position, given that all earlier drafts were accepted; the expected tokens of
a pass are 1 + a_1 + a_1 a_2 + ... The seconds of a pass are the cost model's prediction times the measured ratio for such
passes. Old measurements fade."""

import functools
from collections import Counter
from collections.abc import Iterable

import numpy as np

from mla_jax.base.batch import bucket
from mla_jax.base.errors import BadRequest, Unsupported
from mla_jax.base.options import DRAFTS, MOST_DRAFTS, DraftOptions
from mla_jax.decode.speculative import NOBODY, Drafter, Lookup, Mtp
from mla_jax.mesh.cost import MeshCost

NEARLY = 64  # held tokens that the same prediction is for
KNOWN = 4096  # predictions that are kept
ASSUMED_HELD = 1024  # tokens that a row is taken to hold where nobody knows
FADES = 0.98  # what is left of a measurement after one more dispatch
FIRST = 8  # guesses of each place that are taken to have been seen before any was
OPTIMISTIC = 0.95  # the share with which it is decided whether a number of rows will ever draft
NEWEST = 0.2  # weight of a pass's newest time
# A new time of a pass counts as at most this multiple of the known one, or of the one with nearly as many guesses
WORST = 2.0
PLAIN = 3  # dispatches without guesses to begin with, so that one is timed
AGAIN = 64  # dispatches after which another number of guesses is tried, all in turn


def drafter_of(options: DraftOptions, has_mtp: bool, platform: str = "gpu") -> Drafter:
    """Who guesses. On a CPU nobody does unless it is asked for: there it gains little, and one more program takes as long to
    compile as all others. Raises Unsupported where a model lacks the layer that is asked for, and BadRequest for a number
    of guesses that nobody makes."""
    if options.draft == "off" and options.draft_tokens:
        raise BadRequest(
            f"draft_tokens is {options.draft_tokens}, but draft is off",
            'draft may be "auto", "mtp" or "lookup"',
        )
    if options.draft == "mtp" and not has_mtp:
        raise Unsupported(
            'draft "mtp" is not available for this model', 'it has no layer for that; draft may be "lookup"'
        )
    most = DRAFTS if options.draft_tokens is None else options.draft_tokens
    unasked = options.draft == "auto" and options.draft_tokens is None
    if options.draft == "off" or not most or (unasked and (platform == "cpu" or not has_mtp)):
        return NOBODY
    if options.draft == "lookup":
        return Lookup(most)
    if not has_mtp:
        found = f"draft_tokens is {options.draft_tokens}, but this model has no layer that guesses"
        raise Unsupported(found, 'draft may be "lookup"')
    return Mtp(most)


class Shares:
    """How often a guess in each place has stood, for one class of rows."""

    def __init__(self, hoped: float):
        self.drafted = np.full(MOST_DRAFTS, float(FIRST))
        self.stood = hoped * self.drafted

    def note(self, drafted: np.ndarray, stood: np.ndarray) -> None:
        self.drafted = FADES * self.drafted + drafted
        self.stood = FADES * self.stood + stood

    @property
    def of_places(self) -> np.ndarray:
        """A place that was hardly asked for has the share of the one before it."""
        shares = self.stood / np.maximum(self.drafted, 1e-9)
        for place in range(1, MOST_DRAFTS):
            seen = min(self.drafted[place] / FIRST, 1.0)
            shares[place] = seen * shares[place] + (1 - seen) * shares[place - 1]
        return shares


class Drafting:
    """Decides for each dispatch, whose `rows` are those of all data shards. `fixed` is a number that is always taken."""

    def __init__(self, cost: MeshCost, drafter: Drafter, fixed: int | None = None):
        self.cost, self.drafter, self.fixed = cost, drafter, fixed
        self._shares = {greedy: Shares(drafter.hoped) for greedy in (True, False)}
        # Measured time of a pass over predicted, by rows and guesses
        self._taken: dict[tuple[int, int], float] = {}
        self._known = functools.lru_cache(KNOWN)(self._predict)
        self._sent = 0  # dispatches
        self._plain: Counter[int] = Counter()  # dispatches without guesses, by rows, until one was timed

    def pays(self, rows: int) -> bool:
        """Whether this number of rows may ever draft, as far as it can be predicted: their programs are compiled."""
        best = OPTIMISTIC * np.ones(MOST_DRAFTS)
        return self.drafter.most > 0 and (self.fixed is not None or self._best(rows, ASSUMED_HELD, best) > 0)

    def most_rows(self, counts: Iterable[int]) -> int:
        """The largest of these numbers of rows that may ever draft; 0: none."""
        return max(filter(self.pays, counts), default=0)

    def count(self, greedy: Iterable[bool], held: int) -> int:
        """Guesses of a pass for rows that are `greedy` or not and hold `held` tokens on average; 0: none."""
        if self.fixed is not None:
            return self.fixed
        of_kind = Counter(greedy)
        rows = of_kind.total()
        if self._is_untimed(bucket(rows)):
            return 0
        self._sent += 1
        tries, is_turn = divmod(self._sent, AGAIN)
        if is_turn == 0:
            return tries % (1 + self.drafter.most)
        shares = [self._shares[kind].of_places for kind in of_kind]
        return self._best(rows, held, np.average(shares, axis=0, weights=list(of_kind.values())))

    def _is_untimed(self, rows: int) -> bool:
        """Whether no pass without drafts has been timed yet; given up soon where none can be."""
        self._plain[rows] += (rows, 0) not in self._taken
        return (rows, 0) not in self._taken and self._plain[rows] <= PLAIN

    def note(self, greedy: Iterable[bool], drafted: np.ndarray, stood: np.ndarray) -> None:
        """Records a dispatch's drafted and accepted counts: `[rows, MOST_DRAFTS]` each."""
        kinds = np.fromiter(greedy, bool)
        for kind, shares in self._shares.items():
            mine = np.flatnonzero(kinds == kind)
            if drafted[mine].any():
                shares.note(drafted[mine].sum(0), stood[mine].sum(0))

    def note_time(self, rows: int, held: int, drafts: int, seconds: float) -> None:
        """Records the seconds of a pass."""
        ratio = seconds / self.predicted(rows, held, drafts)
        key = (bucket(rows), drafts)
        nearest = self._nearest(rows, drafts)
        if nearest is not None:
            ratio = min(ratio, WORST * nearest)
        if known := self._taken.get(key):
            ratio = (1 - NEWEST) * known + NEWEST * ratio
        self._taken[key] = ratio

    def seconds(self, rows: int, held: int, drafts: int) -> float:
        """About the seconds of a pass, by the nearest measurement."""
        nearest = self._nearest(rows, drafts)
        return self.predicted(rows, held, drafts) * (1.0 if nearest is None else nearest)

    def _nearest(self, rows: int, drafts: int) -> float | None:
        """Measured time over predicted, with nearly as many guesses; None: nothing was measured for this number of rows."""
        measured = {d: ratio for (n, d), ratio in self._taken.items() if n == bucket(rows)}
        return min(measured.items(), key=lambda each: (abs(each[0] - drafts), each[0]), default=(0, None))[1]

    def predicted(self, rows: int, held: int, drafts: int) -> float:
        """The cost model's seconds of a pass."""
        return self._known(rows, held // NEARLY * NEARLY, drafts)

    def _predict(self, rows: int, held: int, drafts: int) -> float:
        """The program of a pass with drafts computes with the most there can be; those that are not there choose no experts."""
        work = self.cost.shared(rows, 1 + self.drafter.most if drafts else 1, held, 1 + drafts)
        drafting = drafts * self.cost.guess_seconds(work.rows, held) if self.drafter.runs_layer else 0.0
        return self.cost.predicted(work).seconds + drafting

    def explain(self, rows: int) -> str:
        """In words, for this number of rows."""
        name, most = self.drafter.name, self.drafter.most
        if self.fixed is not None:
            return f"drafts: {self.fixed} {'guess' if self.fixed == 1 else 'guesses'} a pass by {name}"
        times = ", ".join(f"{1e3 * self.seconds(rows, ASSUMED_HELD, n):.3g}" for n in range(most + 1))
        rows_said = f"{rows} row{'s' * (rows > 1)}, {ASSUMED_HELD:,} tokens held"
        predicted = f"{rows_said}: a pass with 0 to {most} guesses is predicted to take {times} ms"
        return f"drafts: by {name}, as many as pay, up to {most}; {predicted}"

    def _best(self, rows: int, held: int, shares: np.ndarray) -> int:
        tokens = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(shares[: self.drafter.most]))])
        rates = [count / self.seconds(rows, held, drafts) for drafts, count in enumerate(tokens)]
        return int(np.argmax(rates))
