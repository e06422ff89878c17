"""The cache policy by which rows attend to some of their pages while they decode.

What a decode step caches depends on the pages that were read. It is not what reading the same tokens as a prompt would cache. So
the prefix index learns of prompts alone, and a request that was preempted reads its prompt again, then generates again what it
has told: step by step, with those tokens taken whatever is drawn."""

from mla_jax.base.errors import BadRequest
from mla_jax.base.options import Options, RetrieveOptions
from mla_jax.cache.paged import PAGE
from mla_jax.cache.retrieve import POLICIES, Retrieval
from mla_jax.engine.core.cache_policy import CachePolicy
from mla_jax.engine.core.job import Job


def retrieval_of(options: RetrieveOptions) -> Retrieval | None:
    """As asked for; None if everything is read."""
    if options.retrieve == "off":
        return None
    return Retrieval(POLICIES[options.retrieve], options.retrieve_tokens)


def refuse_contradictions(options: Options) -> None:
    """Raises BadRequest for options that retrieval excludes."""
    retrieve, evict, drafts = options.retrieval.retrieve, options.eviction.evict, options.drafts
    if retrieve == "off":
        return
    if evict != "off":
        raise BadRequest(f'retrieve is "{retrieve}", but evict is "{evict}"', "one of them must be off")
    if options.attention.attention == "naive":
        hint = "that form caches heads, and pages are chosen by latents; take another form"
        raise BadRequest(f'retrieve is "{retrieve}", but attention is "naive"', hint)
    if drafts.draft not in ("auto", "off"):
        raise BadRequest(f'draft is "{drafts.draft}", but retrieve is on', 'draft may be "off"')
    if drafts.draft_tokens:
        raise BadRequest(
            f"draft_tokens is {drafts.draft_tokens}, but retrieve is on",
            "nothing is guessed then; leave it out",
        )


class Retrieving(CachePolicy):
    """Everything is cached, and a decode step attends to the pages that its queries choose."""

    needs_text = True

    def prefilled(self, job: Job) -> list[int]:
        return job.request.prompt

    def replayed(self, job: Job) -> int:
        return len(job.ids)

    def indexed(self, job: Job) -> list[int]:
        return job.request.prompt

    def attended(self, held: int) -> int:
        model = self.programs.model
        retrieval, layers = model.dispatch.retrieval, model.config.num_hidden_layers
        assert retrieval is not None
        dense, most = min(retrieval.dense, layers), retrieval.pages(PAGE) * PAGE
        return (dense * held + (layers - dense) * min(held, most)) // layers
