"""One answer as it comes, and its part of the cache meanwhile."""

from collections.abc import Callable, Generator, Iterator

import numpy as np

from mla_jax.base.errors import BadRequest
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.request import Chunk
from mla_jax.engine.reader import Reader

CacheOf = Callable[[Job], dict[str, np.ndarray]]


class Stream(Iterator[Chunk]):
    """The chunks of an answer: `for chunk in stream`. `close` ends the request, and so does the collector."""

    def __init__(self, chunks: Generator[Chunk], opened: list[Reader], cache_of: CacheOf):
        # `opened` has the reader once the first chunk was asked for
        self._chunks, self._opened, self._cache_of = chunks, opened, cache_of

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def close(self) -> None:
        """Ends the request; the cache forgets what no other request shares."""
        self._chunks.close()

    def cache(self) -> dict[str, np.ndarray]:
        """The cached arrays of all tokens so far, prompt included, in the L layers of the model; float32.

        `c_kv [L T R]` and `k_pe [L T E]`, `k_pe` with RoPE, or `k [L T N H]` and `v [L T N V]` with attention="naive"; with
        indexers also `index_k` of the layers that have one. T is one less than the tokens that are known: the newest one is not
        cached yet. Raises BadRequest while the request has no pages: before its first chunk and after its last; Unsupported on
        a mesh, and where tokens are dropped."""
        if not self._opened or self._opened[0].done:
            raise BadRequest("nothing is cached of this answer", "ask between its first chunk and its last")
        return self._cache_of(self._opened[0].job)
