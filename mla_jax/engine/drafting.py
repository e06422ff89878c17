"""How many guesses a dispatch takes: what has stood so far, against what a pass costs.

A guess stands only if all before it have. So what is measured is, for each place behind the chosen token, how often a guess stood
that was asked for, and tokens a pass are one and the sum of the products of these shares. What a pass takes is predicted by the
cost model, times what was measured of the prediction for such passes. Old measurements fade."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mla_jax.base import roofline
from mla_jax.base.batch import bucket
from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, Unsupported
from mla_jax.base.options import DRAFTS, MOST_DRAFTS, DraftOptions
from mla_jax.decode.speculative import NOBODY, Drafter, Lookup, Mtp

HELD = 1024  # tokens that a row is taken to hold where nobody knows
FADES = 0.98  # what is left of a measurement after one more dispatch
FIRST = 8  # guesses of each place that are taken to have been seen before any was
HOPED = {True: 0.8, False: 0.4}  # how many of these stood: of the model's own layer, of looking up
OPTIMISTIC = 0.95  # the share with which it is decided whether a number of rows will ever draft
NEWEST = 0.2  # weight of a pass's newest time
PLAIN = 3  # dispatches without guesses to begin with, so that one is timed
AGAIN = 64  # dispatches after which one guess is tried where none pays


def drafter_of(options: DraftOptions, has_mtp: bool, platform: str = "gpu") -> Drafter:
    """Who guesses. On a CPU nobody does unless it is asked for: there it gains little, and one more program takes as long to
    compile as all others. Raises Unsupported where a model lacks the layer that is asked for, and BadRequest for a number
    of guesses that nobody makes."""
    if options.draft == "off" and options.draft_tokens:
        raise BadRequest(f"draft_tokens is {options.draft_tokens}, but draft is off", 'draft may be "auto", "mtp" or "lookup"')
    if options.draft == "mtp" and not has_mtp:
        raise Unsupported('draft "mtp" is not available for this model', 'it has no layer for that; draft may be "lookup"')
    most = DRAFTS if options.draft_tokens is None else options.draft_tokens
    unasked = options.draft == "auto" and options.draft_tokens is None
    if options.draft == "off" or not most or (unasked and platform == "cpu"):
        return NOBODY
    if options.draft == "lookup":
        return Lookup(most)
    return Mtp(most) if has_mtp else NOBODY


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
    """Decides for each dispatch. `fixed` is a number that is always taken."""

    def __init__(self, config: Config, device: roofline.Device, drafter: Drafter, fixed: int | None = None):
        self.config, self.device, self.drafter, self.fixed = config, device, drafter, fixed
        hoped = HOPED[isinstance(drafter, Mtp)]
        self._shares = {greedy: Shares(hoped) for greedy in (True, False)}
        self._taken: dict[tuple[int, int], float] = {}  # measured time of a pass over predicted, by rows and guesses
        self._unused = 0  # dispatches since a guess was taken
        self._plain: Counter[int] = Counter()  # dispatches without guesses, by rows, until one was timed

    def pays(self, rows: int) -> bool:
        """Whether so many rows may ever draft, as far as it can be predicted: their programs are compiled."""
        best = OPTIMISTIC * np.ones(MOST_DRAFTS)
        return self.drafter.most > 0 and (self.fixed is not None or self._best(rows, HELD, best) > 0)

    def count(self, greedy: Sequence[bool], held: int) -> int:
        """Guesses of a pass for rows that are `greedy` or not and hold so many tokens on average; 0: none."""
        if self.fixed is not None:
            return self.fixed
        rows = len(greedy)
        if self._is_untimed(bucket(rows)):
            return 0
        shares = np.mean([self._shares[one].of_places for one in greedy], axis=0)
        best = self._best(rows, held, shares)
        self._unused = 0 if best else self._unused + 1
        if self._unused < AGAIN:
            return best
        self._unused = 0
        return 1

    def _is_untimed(self, rows: int) -> bool:
        """Whether it is not known yet what a pass without guesses takes; it is soon given up where none can be timed."""
        self._plain[rows] += (rows, 0) not in self._taken
        return (rows, 0) not in self._taken and self._plain[rows] <= PLAIN

    def note(self, greedy: Sequence[bool], drafted: np.ndarray, stood: np.ndarray) -> None:
        """What a dispatch has found: `[rows, MOST_DRAFTS]` each."""
        for kind, shares in self._shares.items():
            mine = [i for i, one in enumerate(greedy) if one == kind]
            if drafted[mine].any():
                shares.note(drafted[mine].sum(0), stood[mine].sum(0))

    def note_time(self, rows: int, held: int, drafts: int, seconds: float) -> None:
        """What a pass took."""
        ratio, key = seconds / self.predicted(rows, held, drafts), (bucket(rows), drafts)
        self._taken[key] = ratio if key not in self._taken else (1 - NEWEST) * self._taken[key] + NEWEST * ratio

    def seconds(self, rows: int, held: int, drafts: int) -> float:
        """About what a pass takes, by the measurement that is nearest."""
        measured = {d: ratio for (n, d), ratio in self._taken.items() if n == bucket(rows)}
        nearest = min(measured, key=lambda d: (abs(d - drafts), d), default=None)
        return self.predicted(rows, held, drafts) * (1.0 if nearest is None else measured[nearest])

    def predicted(self, rows: int, held: int, drafts: int) -> float:
        """What the cost model says of a pass."""
        each = roofline.mtp_seconds(self.config, self.device, rows) if isinstance(self.drafter, Mtp) else 0.0
        return roofline.pass_seconds(self.config, self.device, rows, held, drafts) + drafts * each

    def explain(self, rows: int) -> str:
        """In words, for so many rows."""
        by_layer, most = isinstance(self.drafter, Mtp), self.drafter.most
        name = "the model's layer for multi-token prediction" if by_layer else "looking up what followed before"
        if self.fixed is not None:
            return f"drafts: {self.fixed} guesses a pass by {name}"
        times = ", ".join(f"{1e3 * self.seconds(rows, HELD, n):.3g}" for n in range(most + 1))
        predicted = f"{rows} rows that hold {HELD:,} tokens: a pass with 0 to {most} guesses is predicted to take {times} ms"
        return f"drafts: by {name}, as many as pay, up to {most}; {predicted}"

    def _best(self, rows: int, held: int, shares: np.ndarray) -> int:
        tokens = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(shares[: self.drafter.most]))])
        rates = [count / self.seconds(rows, held, drafts) for drafts, count in enumerate(tokens)]
        return int(np.argmax(rates))
