"""How much the engine reserves, and what the scheduler may do with that."""

from dataclasses import dataclass

from mla_jax.cache.paged import PAGE
from mla_jax.decode.outputs import STEPS
from mla_jax.engine.core.scheduler import Limits

PIECES = 64  # of prompts that one dispatch reads


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
        """Pages of the longest request: the width of all page tables."""
        return -(-self.context // PAGE)

    @property
    def pieces(self) -> int:
        """Of prompts in one line."""
        return min(self.rows, PIECES)

    def limits(self, reach: int = 1 << 30) -> Limits:
        """`reach` as in Limits. To read the weights once costs as much as some of a chunk's tokens."""
        return Limits(
            rows=self.rows,
            page_size=PAGE,
            lines=self.lines(),
            pieces=self.pieces,
            reach=reach,
            steps=STEPS,
            dispatch=self.chunk // 4,
        )

    def lines(self) -> tuple[int, ...]:
        """Tokens of the programs that read prompts: a chunk, an eighth and a 64th of it."""
        return tuple(dict.fromkeys(max(16, self.chunk // part) for part in (1, 8, 64)))
