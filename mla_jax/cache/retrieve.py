"""Retrieval: a policy summarises each page and scores the summary against a query; a row attends to the best pages.

Queries and keys are those of latents in absorbed form, [q_nope @ uk, q_pe] and [c_kv, k_pe]: their product is a head's exact
logit, before it is scaled. All heads of a layer read the same pages, so a page is chosen for all of them. Nothing is known here
of pools and models.

Letters: G pages to summarise, P pages of a row, K chosen pages, V vectors of a page's summary, L numbers of a key."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mla_jax.base import radix
from mla_jax.cache.evict import LEAST

AT_ONCE = 256 << 20  # bytes of summaries that are copied at a time, about


@dataclasses.dataclass(frozen=True)
class RetrievalPolicy:
    """Scores the pages of a row; those with high scores are read."""

    name: ClassVar[str]
    vectors: ClassVar[int]  # that a page is summed up by
    asks: ClassVar[bool] = False  # whether it looks at what the queries within a page asked for

    def asked(
        self, queries: Float[Array, "G Z L"], keys: Float[Array, "G Z L"], new: Bool[Array, "G Z"]
    ) -> Float[Array, "G Z"]:
        """The attention that the `new` tokens of a page pay to each of its tokens; they may come in several steps."""
        raise NotImplementedError

    def summary(
        self, keys: Float[Array, "G Z L"], held: Bool[Array, "G Z"], asked: Float[Array, "G Z"] | None
    ) -> Float[Array, "G V L"]:
        """Of pages in which the slots `held` have keys; the others may be anything finite."""
        raise NotImplementedError

    def scores(
        self,
        q: Float[Array, "B N L"],
        summary: Float[Array, "B P V L"],
        held: Bool[Array, "B P"],
        scale: float,
    ) -> Float[Array, "B P"]:
        """Of the pages `held`; those of others are not read. `scale` makes logits of products."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Quest(RetrievalPolicy):
    """Quest (arXiv 2406.10774): the lowest and the highest number of each channel bound the scores of a page's tokens."""

    name = "quest"
    vectors = 2

    def summary(
        self, keys: Float[Array, "G Z L"], held: Bool[Array, "G Z"], asked: Float[Array, "G Z"] | None
    ) -> Float[Array, "G V L"]:
        low, high = (jnp.where(held[..., None], keys, none) for none in (jnp.inf, -jnp.inf))
        return jnp.stack([low.min(1), high.max(1)], axis=1)

    def bounds(self, q: Float[Array, "B N L"], summary: Float[Array, "B P V L"]) -> Float[Array, "B N P"]:
        """The upper bound of a head's score for a page's tokens: the sum over channels of the larger of q * low and q * high."""
        parts = jnp.stack([jnp.minimum(q, 0), jnp.maximum(q, 0)], axis=2)
        return jnp.einsum("bnvl,bpvl->bnp", parts, summary, preferred_element_type=jnp.float32)

    def scores(
        self,
        q: Float[Array, "B N L"],
        summary: Float[Array, "B P V L"],
        held: Bool[Array, "B P"],
        scale: float,
    ) -> Float[Array, "B P"]:
        """The logarithm of the pages' votes. Quest chooses for each head; here each head has one vote, which a softmax over the
        bounds shares out."""
        # Sums of bounds are ruled by the heads with the longest queries, and a maximum over heads is one head's choice. As
        # logarithms, votes that would round to zero still differ.
        bounds = jnp.where(held[:, None], self.bounds(q, summary) * scale, -jnp.inf)
        return jax.nn.logsumexp(jax.nn.log_softmax(bounds, axis=-1), axis=1)


@dataclasses.dataclass(frozen=True)
class InfLLM(RetrievalPolicy):
    """InfLLM (arXiv 2402.04617): a page stands for its tokens that the tokens after them in the page asked for most.

    How much is the mean over these of q . k, the heads' queries added up. A page's score is the product of the query and the mean
    of its representatives, which is the mean of their products: one vector is enough."""

    representatives: int = 4

    name = "infllm"
    vectors = 1
    asks = True

    def asked(
        self, queries: Float[Array, "G Z L"], keys: Float[Array, "G Z L"], new: Bool[Array, "G Z"]
    ) -> Float[Array, "G Z"]:
        """The sum of q . k over the new tokens from each on."""
        products = jnp.einsum("gtl,gml->gtm", queries, keys, preferred_element_type=jnp.float32)
        sees = np.tri(keys.shape[1], dtype=bool) & new[:, :, None]
        return jnp.where(sees, products, 0).sum(1)

    def summary(
        self, keys: Float[Array, "G Z L"], held: Bool[Array, "G Z"], asked: Float[Array, "G Z"] | None
    ) -> Float[Array, "G V L"]:
        assert asked is not None
        asking = held.sum(1, keepdims=True) - jnp.arange(held.shape[1])  # tokens that see it
        score = jnp.where(held, asked / jnp.maximum(asking, 1), -jnp.inf)
        taken = best(score, self.representatives) & held
        total = jnp.where(taken[..., None], keys, 0).sum(1, keepdims=True, dtype=jnp.float32)
        return (total / jnp.maximum(taken.sum(1), 1)[:, None, None]).astype(keys.dtype)

    def scores(
        self,
        q: Float[Array, "B N L"],
        summary: Float[Array, "B P V L"],
        held: Bool[Array, "B P"],
        scale: float,
    ) -> Float[Array, "B P"]:
        return jnp.einsum("bl,bpl->bp", q.sum(1), summary[:, :, 0], preferred_element_type=jnp.float32)


RETRIEVAL_POLICIES: dict[str, RetrievalPolicy] = {policy.name: policy for policy in (Quest(), InfLLM())}


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """The context of a decoding row: the pages that its queries attend to, chosen by a policy."""

    policy: RetrievalPolicy
    tokens: int  # of context, in each layer; in whole pages
    dense: int = 2  # first layers that attend to everything, as in Quest's code
    recent: int = 2  # newest pages that are always read, with the one that is written
    window: int | None = None  # farther back all tokens are at this distance; None: each at its own

    def with_window(self, window: int, size: int) -> "Retrieval":
        """With the pages of `size` tokens that hold the window always read, so that no page is left out within it."""
        return dataclasses.replace(self, window=window, recent=max(self.recent, -(-window // size) + 1))

    def pages(self, size: int) -> int:
        """Pages of `size` tokens that a row attends to: more than those that are always read."""
        pages = self.tokens // size
        assert pages > self.recent, "the first page and the newest ones are always read"
        return pages


def rows_at_once(size: int) -> int:
    """Rows whose pages are scored at a time, a power of two, where the summaries of one row take `size` bytes."""
    return 1 << max(AT_ONCE // size, 1).bit_length() - 1


class ChosenPages(NamedTuple):
    """The pages that rows attend to."""

    # In the row's page table, ascending; what comes after a row's last page may be any
    place: Int[Array, "B K"]
    left_out: Int[Array, " B"]  # pages of the row that are not among them


def chosen(scores: Float[Array, "B P"], pages: Int[Array, " B"], count: int, recent: int) -> ChosenPages:
    """The first of each row's `pages`, its `recent` last ones, and those with the highest scores: `count` in all, if there are.

    Of equal scores the first is better; those that are not finite are lowest."""
    place = jnp.arange(scores.shape[1])
    held = place < pages[:, None]
    always = (place == 0) | (place >= pages[:, None] - recent)
    scores = jnp.where(always, jnp.inf, jnp.where(jnp.isfinite(scores), scores, LEAST))
    taken = best(jnp.where(held, scores, -jnp.inf), count) & held
    order = jnp.cumsum(taken, axis=1) - 1
    is_at = taken[:, None] & (order[:, None] == jnp.arange(count)[:, None])
    # what follows from lengths alone is the same in all layers, and so is what a kernel makes of it
    return ChosenPages(jnp.where(is_at, place, 0).sum(2), jnp.maximum(pages - count, 0))


def best(scores: Float[Array, "B P"], count: int) -> Bool[Array, "B P"]:
    """The `count` highest of each row, of equal ones the first."""
    scores = jnp.where(jnp.isnan(scores), LEAST, scores)
    return radix.first(radix.descending(scores), jnp.full(len(scores), count, jnp.int32))
