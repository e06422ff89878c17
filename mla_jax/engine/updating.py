"""Changes the weights of an LLM while it serves: requests that have begun are finished with the earlier ones first."""

from functools import partial
from typing import TYPE_CHECKING, Any

from mla_jax.engine.core.engine import Engine
from mla_jax.model.trainable import refuse_apart
from mla_jax.weights.masters import ByPath, as_held, parameters_by_path

if TYPE_CHECKING:
    from mla_jax.engine.llm import LLM


def update(llm: "LLM", weights: Any) -> ByPath:
    """Has `llm` serve other weights; see `LLM.update`. Returns the earlier ones."""
    refuse_apart(llm.model)
    return exchange(llm, llm._worker.call(partial(_converted, llm, weights)))


def _converted(llm: "LLM", weights: Any) -> ByPath:
    """On the engine's thread: two threads that send programs to the devices of a mesh can have them wait for each other."""
    with llm._memory_explained():
        return as_held(llm.model, weights)


def exchange(llm: "LLM", values: ByPath) -> ByPath:
    """Has `llm` serve values of all its parameters, as it holds them, and returns the earlier ones."""
    return llm._worker.between(partial(_exchanged, llm, values))


def _exchanged(llm: "LLM", values: ByPath) -> ByPath:
    """As `exchange`, on the engine's thread, while no request is under way."""
    assert isinstance(llm.engine, Engine)
    if llm._routing is not None:
        llm._take_load()
    before = {}
    for path, parameter in parameters_by_path(llm.model).items():
        before[path] = parameter.get_raw_value()
        parameter.set_raw_value(values[path])
    llm._take_weights(llm.engine.forget)
    return before
