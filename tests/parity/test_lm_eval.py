"""lm-eval's figures in this process, over HTTP and from transformers agree, on tasks made of Python's own documentation."""

import inspect
import json
import shutil

import models
import numpy as np
import pytest
from loopback import no_network  # noqa: F401
from servers import Running, started

from mla_jax import LLM
from mla_jax.weights.hub import DEMO

pytestmark = pytest.mark.parity
METHODS = sorted(name for name in dir(str) if not name.startswith("_"))
CHOICES = 4


def documents() -> list[dict]:
    """The first lines of what Python says of a text's methods, each with names to choose from."""
    found = []
    for number, name in enumerate(METHODS):
        others = [METHODS[(number + step) % len(METHODS)] for step in range(CHOICES)]
        words = (inspect.getdoc(getattr(str, name)) or "").split("\n\n")[0]
        found.append({"text": words, "choices": [f" {other}" for other in others], "target": 0})
    return found


def task(output_type: str, **config):
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    given = {
        "task": f"documentation_{output_type}",
        "output_type": output_type,
        "test_split": "test",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(documents())},
        **config,
    }
    return ConfigurableTask(config=given)


def tasks() -> list:
    until = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    asked = {"doc_to_text": "{{text}}\nThe method is"}
    return [
        task("multiple_choice", doc_to_choice="choices", doc_to_target="target", **asked),
        task("loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}"),
        task("generate_until", doc_to_target="{{choices[0]}}", generation_kwargs=until, **asked),
    ]


@pytest.fixture(scope="module", autouse=True)
def no_updates():
    """lm-eval's packages, as they are imported, do not look for updates on the network, which they do again and again."""
    with pytest.MonkeyPatch.context() as patch:
        for package in ("HUB", "DATASETS", "EVALUATE"):
            patch.setenv(f"HF_{package}_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with the demo's tokenizer, as transformers saved it."""
    pytest.importorskip("lm_eval", reason="the extra `parity` is missing")
    oracle = pytest.importorskip("parity.oracle", reason="the extra `parity` is missing", exc_type=ModuleNotFoundError)
    hf = {**models.FAMILIES["v2"], "vocab_size": 4096, "num_hidden_layers": 2}
    source, saved = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("saved")
    oracle.load(models.write(source, hf, models.tensors(hf))).save_pretrained(saved)
    shutil.copy(DEMO / "tokenizer.json", saved)
    # lm-eval asks a server for tokens without BOS
    settings = json.loads((DEMO / "tokenizer_config.json").read_text()) | {"add_bos_token": False}
    (saved / "tokenizer_config.json").write_text(json.dumps(settings))
    return saved


@pytest.fixture(scope="module")
def running(folder) -> Running:
    yield from started(folder, model_name=("random",))


def figures(model) -> dict:
    """Findings of lm-eval for each task: all responses of the model."""
    import lm_eval

    found = lm_eval.simple_evaluate(model=model, tasks=tasks(), log_samples=True, bootstrap_iters=0)
    return {name: [sample["resps"] for sample in samples] for name, samples in found["samples"].items()}


@pytest.fixture(scope="module")
def of_transformers(folder) -> dict:
    import transformers
    from lm_eval.models.huggingface import HFLM
    from parity import oracle

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return figures(HFLM(pretrained=oracle.load(folder), tokenizer=tokenizer))


def check(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, samples in expected.items():
        for ours, theirs in zip(found[name], samples, strict=True):
            if name.endswith("generate_until"):
                assert ours == theirs
            else:
                np.testing.assert_allclose(numbers(ours), numbers(theirs), rtol=1e-4, atol=1e-3, err_msg=name)


def numbers(responses) -> list[float]:
    return np.array([np.ravel(one) for one in responses], float).ravel().tolist()


def test_in_this_process(folder, of_transformers):
    from mla_jax.evaluate.harness import Harness

    with LLM(folder) as llm:
        check(figures(Harness(llm)), of_transformers)


def test_over_http(running, of_transformers):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    url = f"{running.url}/v1/completions"
    model = LocalCompletionsAPI(base_url=url, model="random", tokenizer_backend="remote", max_length=512)
    found = figures(model)
    # Its remote tokenizer takes a BOS of id 0 for none, and begins with the end token
    begun_otherwise = [name for name in found if name.endswith("rolling")]
    for name in begun_otherwise:
        del found[name]
    check(found, {name: samples for name, samples in of_transformers.items() if name in found})
