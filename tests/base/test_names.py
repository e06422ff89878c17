"""A name that is unknown gets the one of ours that was meant, whichever engine it is from."""

import inspect

import jaxtyping
import pytest

from mla_jax.base.errors import BadRequest
from mla_jax.base.names import ABSENT, MEANT, nearest, only_known_names
from mla_jax.base.options import HOMES, OPENING, Evict, Options, SamplingParams, names


@pytest.fixture(autouse=True)
def no_checks_of_type(monkeypatch):
    """Users run without the checks of the tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def generate(self, prompts, params=None):
    """Takes what LLM.generate takes."""
    return prompts, params


@pytest.mark.parametrize(
    ("call", "settings", "words"),
    [
        (SamplingParams, {"temp": 1}, "SamplingParams has no setting temp\n  did you mean temperature?"),
        (SamplingParams, {"max_new_tokens": 5}, "did you mean max_tokens?"),
        (SamplingParams, {"temprature": 1}, "did you mean temperature?"),
        (SamplingParams, {"max_model_len": 8}, "did you mean LLM(context=...)?"),
        (Options.of, {"tensor_parallel_size": 2}, 'LLM has no setting tensor_parallel_size\n  did you mean mesh="tensor=N"?'),
        (Options.of, {"gpu_memory_utilization": 0.9}, "did you mean memory_fraction?"),
        (Options.of, {"max_model_len": 8}, "did you mean context?"),
        (Options.of, {"trust_remote_code": True}, "code of a model folder is never run"),
        (Options.of, {"temperature": 1}, "did you mean SamplingParams(temperature=...)?"),
        (Options, {"batch": 8}, "did you mean LLM(batch=...)?"),
        (Evict, {"evict_keep": 1}, "did you mean LLM(evict_keep=...)?"),
        (only_known_names(generate, HOMES), {"self": 0, "max_tokens": 5}, "did you mean SamplingParams(max_tokens=...)?"),
        (only_known_names(generate, HOMES), {"self": 0, "max_new_tokens": 5}, "did you mean SamplingParams(max_tokens=...)?"),
        (only_known_names(generate, HOMES), {"self": 0, "sampling_params": 5}, "did you mean params?"),
    ],
)
def test_an_unknown_setting_gets_the_right_word(call, settings, words):
    settings.pop("self", None)
    with pytest.raises(BadRequest) as refused:
        call(*([0, "a"] if call not in (SamplingParams, Options, Evict, Options.of) else []), **settings)
    assert words in str(refused.value)


def test_every_word_of_others_leads_to_a_name_that_exists():
    ours = {*OPENING, *names(SamplingParams), "params"}
    assert {meant.partition("=")[0] for meant in MEANT.values()} <= ours
    assert not (MEANT.keys() | ABSENT.keys()) & ours


def test_a_misspelt_word_gets_the_nearest_known_one():
    assert nearest("temprature", ["top_k", "temperature"]) == "did you mean temperature?"
    assert nearest("xyz", ["top_k", "temperature"]) == "known: top_k, temperature"


def test_signatures_stay_those_that_an_editor_shows():
    assert list(inspect.signature(SamplingParams).parameters) == names(SamplingParams)
    assert list(inspect.signature(only_known_names(generate, HOMES)).parameters) == ["self", "prompts", "params"]
