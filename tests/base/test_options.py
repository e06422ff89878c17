"""Every option has a range; all faults are reported at once, in words, before JAX is imported."""

import dataclasses
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from mla_jax.base import options as declared
from mla_jax.base.errors import BadRequest, shown
from mla_jax.base.grammar import Grammar
from mla_jax.base.link_rates import PLANNED
from mla_jax.base.logits_processor import LogitsProcessor
from mla_jax.base.options import AttentionOptions, Evict, ExpertOptions, Options, SamplingParams
from mla_jax.base.settings import SettingsOfModel
from mla_jax.ui.help import _field_docs


@pytest.fixture(autouse=True)
def no_checks_of_type(monkeypatch):
    """Users run without the checks of the tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


SETTINGS = [(group, setting.name) for group in declared.GROUPS.values() for setting in dataclasses.fields(group)]
IN_RANGE = {
    "temperature": [0, 0.0, 1e-9, 1, 1000],
    "top_k": [0, 1, 10**12],
    "top_p": [0, 0.5, 1],
    "min_p": [0, 1],
    "presence_penalty": [-100, 0, 2.5, 100],
    "frequency_penalty": [-100, 0, 2.5, 100],
    "repetition_penalty": [1e-3, 1, 1000],
    "max_tokens": [0, 1, 10**9],
    "min_tokens": [0, 1, 10**9],
    "timeout": [1e-3, 1, 1e6],
    "seed": [0, 2**64 - 1],
    "logprobs": [0, 20],
    "prompt_logprobs": [0, 20],
    "logit_bias": [None, {}, {0: -100.0, 2**31 - 1: 100.0}, dict.fromkeys(range(300), 1.0)],
    "n": [1, 128],
    "stop": [(), "end", ("a", "b"), ["a"], ("x",) * 64],
    "stop_token_ids": [(), (0, 2**31 - 1), [3], 3],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True, False],
    "grammar": [None, Grammar.regex("a"), Grammar.choice(["a"])],
    "logits": [None, LogitsProcessor(lambda *given: given)],
}
NO_NUMBERS = ["1", (1,), True, math.nan, math.inf, -math.inf, {}, object(), 1j]
OUT_OF_RANGE = {
    "temperature": [-1e-9, 1000.1, *NO_NUMBERS],
    "top_k": [-1, 1.0, *NO_NUMBERS],
    "top_p": [-0.1, 1.1, 2, *NO_NUMBERS],
    "min_p": [-0.1, 1.1, None, *NO_NUMBERS],
    "presence_penalty": [-101, 101, None, *NO_NUMBERS],
    "frequency_penalty": [-101, 101, None, *NO_NUMBERS],
    "repetition_penalty": [0, -1, 1001, None, *NO_NUMBERS],
    "timeout": [0, -1, 1e6 + 1, *NO_NUMBERS],
    "max_tokens": [-1, 1.5, 10**5000, *NO_NUMBERS],
    "min_tokens": [-1, 1.5, None, 10**5000, *NO_NUMBERS],
    "seed": [-1, 2**64, 0.5, *NO_NUMBERS],
    "logprobs": [-1, 21, *NO_NUMBERS],
    "prompt_logprobs": [-1, 21, *NO_NUMBERS],
    "logit_bias": [
        {-1: 1},
        {2**31: 1},
        {1: 101},
        {1: math.nan},
        {"a": 1},
        {"-1": 1},
        {"9" * 99: 1},
        [(1, 1)],
        dict.fromkeys(range(301), 1),
    ],
    "grammar": ["a", 1, True, {}, {"a": 1}, {"regex": 1}, {"regex": "a", "lark": "a"}, {"json_object": False}],
    "logits": [1, True, "a", (), [0.5], {}],
    "n": [0, 129, 10**6, 1.0, None, *NO_NUMBERS],
    "stop": [("",), "", (1,), None, 7, ("a",) * 65, b"ab", {"a": 1}, itertools.count()],
    "stop_token_ids": [(-1,), (2**31,), ("a",), (True,), 1.5, None, tuple(range(65)), "12", itertools.count()],
    "ignore_eos": [1, 0, "yes", None, []],
    "include_stop_str_in_output": [1, 0, "yes", None, []],
}
WRONG = {  # of the options of a model
    "model": ["", 7, b"model", ["a"]],
    "dtype": ["float16", "", 32, np.float64, np.dtype("float16"), float, ["float32"], object()],
    "context": [0, -1, "8", 8.0, True, [8]],
    "attention": ["flash", None, 1, ["naive"], ""],
    "kv_cache": ["int7", None, 8],
    "experts": ["gpu", None, {}, 0],
    "host_layers": [-1, "all", 1.5, True],
    "host_precision": [8, b"int8", ["int8"]],
    "host_folder": ["", 3, ["a"]],
    "defer": [-1, None, "2", 1.0],
    "stream_tokens": [-1, "never", 0.5],
    "routing_stats": ["", 1, True],
    "device_experts": [-1, "few", 2.0],
    "draft": ["", "MTP", None, 3, ["mtp"]],
    "draft_tokens": [-1, 8, 1.0, "3", True],
    "evict": ["", "SnapKV", None, 3, True],
    "evict_budget": ["all", None, 1],
    "evict_keep": [0, 0.0, -0.5, 1.01, 2**20 + 1, None, "0.5", True, math.nan, math.inf],
    "evict_chunk": [0, 63, 2**20 + 1, 64.0, "64", True],
    "evict_sinks": [-1, 4097, 1.0, "4", None, True],
    "evict_recent": [0, 4097, 1.0, "4", None, True],
    "retrieve": ["", "Quest", "page", None, 4, True],
    "retrieve_tokens": [0, 255, -1, 4096.0, "4096", None, True],
    "retrieve_window": [0, -1, 64.0, "64", True],
    "memory_fraction": [0, 0.0, -0.5, 1.01, 2, "0.5", True, math.nan, None.__class__],
    "batch": [0, 1025, -1, 1.0, "4", None, True],
    "max_rows": [0, 1025, -1, 1.0, "4", True],
    "max_waiting": [-1, 1.0, "4", True],
    "cache_tokens": [0, 63, -1, 1e6, "4096", True],
    "host_cache": [-1, -0.5, 2**20 + 1, "8", True, None, math.nan, math.inf],
    "mesh": [
        "",
        "data",
        "data=0",
        "data=8,data=2",
        "rows=8",
        "data=1.5",
        8,
        True,
        {"data": 0},
        {"rows": 2},
        ["data=8"],
        "data=2\n",
        "data=10000",
        {"data": "2"},
        {"data": 2.0},
        {"data": True},
        {"data": 10**5000},
        {5: 2},
        {},
    ],
    "coordinator": [8476, True, b"node1:8476"],
    "processes": [0, -1, "2", 2.0, True],
    "process_id": [-1, "0", 1.0, True],
    "device": ["", "h300", "H200", "NVIDIA H200", "cpu", 8, True, ["h200"]],
}


def test_every_option_is_among_those_that_are_tried():
    assert WRONG.keys() == {name for _, name in SETTINGS}
    assert IN_RANGE.keys() == OUT_OF_RANGE.keys() == {f.name for f in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", IN_RANGE)
def test_what_is_in_range_is_taken(name):
    for value in IN_RANGE[name]:
        params = SamplingParams(**{name: value})
        if name not in ("stop", "stop_token_ids"):
            assert getattr(params, name) == value


def test_a_function_of_logits_becomes_a_processor_without_a_state():
    function = SamplingParams  # anything that can be called
    params = SamplingParams(logits=function)
    assert (params.logits.function, params.logits.state) == (function, ())


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_what_is_out_of_range_is_refused_by_name(name):
    for value in OUT_OF_RANGE[name]:
        with pytest.raises(BadRequest) as refused:
            SamplingParams(**{name: value})
        assert any(line.startswith(f"{name} is ") for line in refused.value.args[1:]), value


@pytest.mark.parametrize(("group", "name"), SETTINGS, ids=[name for _, name in SETTINGS])
def test_options_of_a_model_with_a_wrong_value_are_refused_by_name(group, name):
    for value in WRONG[name]:
        for make in (group, Options.of):
            with pytest.raises(BadRequest) as refused:
                make(**{name: value})
            assert any(line.startswith(f"{name} is ") for line in refused.value.args[1:]), value


def test_all_faults_are_reported_at_once():
    with pytest.raises(BadRequest) as refused:
        SamplingParams(temperature=-1, top_p=2, stop="", max_tokens=-3)
    assert len(refused.value.args) == 5


def test_stops_are_kept_as_tuples_however_given():
    params = SamplingParams(stop="end", stop_token_ids=[4, 5])
    assert (params.stop, params.stop_token_ids) == (("end",), (4, 5))
    assert SamplingParams(stop=["a", "b"], stop_token_ids=9) == SamplingParams(stop=("a", "b"), stop_token_ids=(9,))


def test_token_ids_of_biases_may_be_text_as_in_json():
    assert SamplingParams(logit_bias={"50": -100, 7: 1}).logit_bias == {50: -100.0, 7: 1.0}


def test_numbers_of_numpy_and_paths_become_plain_values():
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(7), stop_token_ids=np.array([3, 4]))
    assert [type(v) for v in (params.temperature, params.max_tokens, *params.stop_token_ids)] == [float, int, int, int]
    options = Options.of(model=Path("folder"), routing_stats=Path("a.json"), batch=np.int32(2))
    assert (options.model.model, options.experts.routing_stats, options.memory.batch) == ("folder", "a.json", 2)


def test_a_mesh_may_be_text_sizes_by_axis_or_an_object_with_axes():
    class Mesh:
        axis_names = ("data",)

    own = Mesh()
    given = (None, "auto", "data=4,tensor=2", {"data": np.int64(4), "context": 2}, own)
    assert [Options.of(mesh=mesh).mesh.mesh for mesh in given] == [None, "auto", "data=4,tensor=2", "data=4,context=2", own]


def test_single_settings_go_to_their_groups_and_leave_the_others():
    options = Options.of(attention="absorbed", experts="host").replace(kv_cache="fp8", batch=4)
    assert options.attention == AttentionOptions("absorbed", "fp8")
    assert options.experts == ExpertOptions("host")
    assert options.memory.batch == 4
    assert hash(options) == hash(Options.of(attention="absorbed", experts="host", kv_cache="fp8", batch=4))


def test_an_unknown_option_gets_a_suggestion():
    with pytest.raises(BadRequest, match=re.escape("LLM has no setting attenton\n  did you mean attention?")):
        Options.of(attenton="absorbed")


@pytest.mark.parametrize("group", declared.GROUPS)
def test_a_group_that_is_none_is_refused_by_name(group):
    with pytest.raises(BadRequest, match=f"{group} is 'absorbed', expected "):
        Options(**{group: "absorbed"})


def test_names_are_those_that_the_model_computes_by():
    from mla_jax.model.mla import FORMS
    from mla_jax.model.moe import BACKENDS

    assert ("auto", *FORMS, "fused") == declared.ATTENTION
    assert set(declared.EXPERTS) == {"auto", "host", *BACKENDS}


def test_a_dtype_of_jax_numpy_or_torch_becomes_its_name():
    given = (jnp.bfloat16, jnp.dtype("bfloat16"), "torch.bfloat16", np.float32, np.dtype("float32"), jnp.float32)
    found = [Options.of(dtype=dtype).model.dtype for dtype in given]
    assert found == ["bfloat16"] * 3 + ["float32"] * 3


def test_the_keywords_that_editors_complete_are_the_settings_with_their_types():
    wider = {"dtype", "evict", "mesh", "model"}  # in Python they take more than text
    keywords = SettingsOfModel.__annotations__
    assert list(keywords) == [name for _, name in SETTINGS[1:]] + ["model"]
    for group, name in SETTINGS:
        assert name in wider or keywords[name] == group.__annotations__[name]


def test_every_choice_is_named_in_the_help_of_its_option():
    choices = {"attention": declared.ATTENTION, "kv_cache": declared.KV_CACHE, "experts": declared.EXPERTS}
    choices |= {"dtype": declared.DTYPES, "draft": declared.DRAFT, "evict": declared.EVICT, "retrieve": declared.RETRIEVE}
    choices |= {"evict_budget": declared.BUDGETS, "device": tuple(PLANNED)}
    for group, name in SETTINGS:
        assert set(choices.get(name, ())) <= set(re.findall(r"\w+", _field_docs(group)[name])), name


def test_the_page_of_options_has_every_group():
    page = (Path(__file__).parents[2] / "docs/api/results.md").read_text()
    for kind in (*declared.GROUPS.values(), Evict, SamplingParams, declared.OutputOptions, declared.PromptOptions):
        assert f"::: mla_jax.base.options.{kind.__name__}\n" in page


def test_any_value_can_be_shown():
    class Hostile:
        def __repr__(self):
            raise RuntimeError

    assert shown(10**5000) == "a number of 16,610 bits"
    assert shown(Hostile()).startswith("a Hostile ")
    assert len(shown("x" * 10**6)) < 100


def test_options_are_refused_without_jax():
    code = "import sys; from mla_jax import BadRequest, Options\n"
    code += "try: Options.of(attention='flash')\n"
    code += "except BadRequest: print(sorted({'jax', 'flax', 'numpy'} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    assert run.stdout == "[]\n"


# an eviction policy and what it keeps, as one value


class Newest:
    """A policy is any object with this method."""

    def of_block(self, seen):
        return seen.slot


def test_evict_stands_for_its_settings():
    options = Options.of(evict=Evict("snapkv", budget="uniform", keep=0.1), batch=2)
    assert options == Options.of(evict="snapkv", evict_budget="uniform", evict_keep=0.1, batch=2)
    policy = Newest()
    assert Options.of(evict=Evict(policy)).eviction.evict is policy
    assert Options.of(evict=policy).eviction.evict is policy


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: Evict("snap"), "policy is 'snap', expected one of off, snapkv"),
        (lambda: Evict(Newest), "policy is "),
        (lambda: Evict("snapkv", budget="all"), "budget is 'all'"),
        (lambda: Evict("snapkv", keep=0), "keep is 0"),
        (lambda: Options.of(evict=Evict("snapkv"), evict_keep=0.5), "evict_keep is given twice"),
    ],
)
def test_what_evict_cannot_be_is_refused(make, found):
    with pytest.raises(BadRequest, match=found):
        make()


def test_a_window_is_of_infllm_and_leaves_room_for_pages_before_it():
    given = {"retrieve": "infllm", "retrieve_window": 1000}
    assert Options.of(**given, retrieve_tokens=1256).retrieval.retrieve_window == 1000
    with pytest.raises(BadRequest, match=r"retrieve_tokens is 1,255.*\n.*at least 1,256"):
        Options.of(**given, retrieve_tokens=1255)
    for other in ("quest", "off"):
        with pytest.raises(BadRequest, match="retrieve_window is InfLLM's"):
            Options.of(**given | {"retrieve": other})


def test_a_device_that_is_not_here_needs_sizes_of_a_mesh_or_is_alone():
    assert Options.of(device="h200").mesh.mesh is None
    assert Options.of(device="h200", mesh={"data": 4, "tensor": 2}).mesh.mesh == "data=4,tensor=2"
    with pytest.raises(BadRequest, match="sizes"):
        Options.of(mesh="auto", device="h200")
