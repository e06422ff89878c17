"""How much the engine reserves, and what the scheduler may do with that."""

from dataclasses import dataclass
from functools import cached_property

from mla_jax.base.batch import bucket
from mla_jax.cache.paged import PAGE
from mla_jax.decode.outputs import STEPS
from mla_jax.engine.core.scheduler import Limits

PIECES = 64  # of prompts that one dispatch reads
# A program has one number of rows and one width of page tables: few of each, for each combination is compiled
ROW_COUNTS = (1, 2, 4, 8, 32, 64, 128, 256, 512)
MIXED_COUNTS = (8, 128)
NARROWEST, NARROWER = 64, 8  # pages, and how many times as wide the next one is


@dataclass(frozen=True)
class Size:
    """The engine's reservation, on the device unless it says otherwise."""

    rows: int  # requests that run at a time
    pages: int  # of the pool, for each layer
    context: int  # tokens of one request
    chunk: int  # tokens of prompts that one dispatch reads
    hosted: int = 0  # pages in the host's memory for what the prefix index forgets

    @property
    def width(self) -> int:
        """Pages of the longest request."""
        return -(-self.context // PAGE)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Of page tables, the narrowest first: each is an eighth of the next, rounded up."""
        widths = [self.width]
        while widths[0] > NARROWEST:
            widths.insert(0, -(-widths[0] // NARROWER))
        return tuple(widths)

    def width_for(self, pages: int) -> int:
        """The narrowest page table that holds this number of pages."""
        return next(width for width in self.widths if width >= min(pages, self.width))

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """Rows of the programs that decode."""
        return (*(count for count in ROW_COUNTS if count < self.rows), bucket(self.rows))

    @cached_property
    def mixed_counts(self) -> tuple[int, ...]:
        """Rows of the programs that read prompts as well."""
        return (*(count for count in MIXED_COUNTS if count < self.rows), bucket(self.rows))

    @property
    def pieces(self) -> int:
        """Of prompts in one line."""
        return min(self.rows, PIECES)

    def limits(self, reach: int = 1 << 30, streamed_line: int = 1 << 30) -> Limits:
        """`reach` and `streamed_line` as in Limits. To read the weights once costs as much as some of a chunk's tokens."""
        return Limits(
            rows=self.rows,
            page_size=PAGE,
            lines=self.lines(),
            pieces=self.pieces,
            reach=reach,
            streamed_line=streamed_line,
            steps=STEPS,
            dispatch=self.chunk // 4,
        )

    def lines(self) -> tuple[int, ...]:
        """Tokens of the programs that read prompts: a chunk, an eighth and a 64th of it."""
        return tuple(dict.fromkeys(max(16, self.chunk // part) for part in (1, 8, 64)))
