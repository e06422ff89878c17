"""What one data shard of a mesh has: rows and pages of its own, and the requests that run there. One device is one shard."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mla_jax.engine.core.pages import Pages

if TYPE_CHECKING:
    from mla_jax.engine.core.job import Job


@dataclass(eq=False)
class Shard:
    """Page and row numbers are those of the shard's own pool and table."""

    number: int
    pages: Pages
    free_rows: list[int]
    running: "list[Job]" = field(default_factory=list)


def by_shard(jobs: "Sequence[Job]", count: int) -> "list[list[Job]]":
    """Running jobs by the number of their shard, of `count` shards."""
    found: list[list[Job]] = [[] for _ in range(count)]
    for job in jobs:
        assert job.shard is not None
        found[job.shard.number].append(job)
    return found
