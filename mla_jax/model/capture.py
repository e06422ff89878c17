"""Captures of a forward pass over whole sequences: hidden states, attention weights, chosen experts, latents.

Attention is captured by a form around the form: it hands on the same queries, and keeps the softmax of the scores that the form
computes. So every form shows its own attention, and no form knows of it."""

from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtyping import Array

from mla_jax.model.block_attention import Cached, RecordedStep

if TYPE_CHECKING:
    from mla_jax.model.mla import Form


class LayerCapture(NamedTuple):
    """The parts of one layer that are captured."""

    attention: bool = False
    router: bool = False
    cache: bool = False

    def over(self, form: "Form", found: dict[str, Array]) -> "Form":
        """The form, which also writes its captures to `found`."""
        if not (self.attention or self.cache):
            return form

        def remembers(c_kv: Array, k_pe: Array, up: Any, x: Any = None) -> Cached:
            if self.cache:
                found["c_kv"], found["k_pe"] = c_kv, k_pe
            return form.remembers(c_kv, k_pe, up, x)

        def attends(q: Any, held: Any, up: Any, scale: float) -> Array:
            if self.attention:
                held = RecordedStep(held.new, held.step, held.reads, found)
            return form.attends(q, held, up, scale)

        return form._replace(remembers=remembers, attends=attends)


class Capture(NamedTuple):
    """The parts of a pass that are captured; numbers are of layers.

    `hidden` are layers whose input is kept, and the number of layers for the last one's output. The `lens` unembeds these."""

    hidden: tuple[int, ...] = ()
    lens: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()
    router: bool = False
    cache: bool = False

    def of_layer(self, number: int) -> LayerCapture:
        return LayerCapture(number in self.attention, self.router, self.cache)
