"""The cache policy by which rows attend to some of their pages while they decode.

The cache of a decode step depends on the chosen pages, and differs from a prefill's of the same tokens. So the prefix
index has prompts alone, and a preempted request prefills its prompt again, then replays its output step by step."""

from mla_jax.base.options import RetrieveOptions
from mla_jax.cache.paged import PAGE
from mla_jax.cache.retrieve import RETRIEVAL_POLICIES, Retrieval
from mla_jax.engine.core.cache_policy import CachePolicy
from mla_jax.engine.core.job import Job


def retrieval_of(options: RetrieveOptions) -> Retrieval | None:
    """As asked for; None if everything is read."""
    if options.retrieve == "off":
        return None
    retrieval = Retrieval(RETRIEVAL_POLICIES[options.retrieve], options.retrieve_tokens)
    window = options.retrieve_window
    return retrieval if window is None else retrieval.with_window(window, PAGE)


class Retrieving(CachePolicy):
    """Everything is cached, and a decode step attends to the pages that its queries choose."""

    needs_text = True

    def prefilled(self, job: Job) -> list[int]:
        return job.request.prompt

    def replayed(self, job: Job) -> int:
        return len(job.ids)

    def indexed(self, job: Job) -> int:
        return len(job.request.prompt)

    def attended(self, held: int) -> int:
        model = self.programs.model
        retrieval, layers = model.dispatch.retrieval, model.config.num_hidden_layers
        assert retrieval is not None
        dense, most = min(retrieval.dense, layers), retrieval.pages(PAGE) * PAGE
        return (dense * held + (layers - dense) * min(held, most)) // layers
