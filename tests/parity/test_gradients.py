"""Gradients of `trainable()` and torch's, through transformers' model of the same weights, in float32."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx

from mla_jax import LLM
from mla_jax.base.batch import Batch
from mla_jax.weights.hf_names import HF

pytestmark = pytest.mark.parity
TOKENS = np.random.default_rng(3).integers(2, 96, (2, 20))


@pytest.fixture(scope="module")
def oracle():
    return pytest.importorskip("parity.oracle", reason="the extra `parity` is missing", exc_type=ModuleNotFoundError)


def ours(llm: LLM) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and its gradients by released names."""
    graph, weights, rest = nnx.split(llm.trainable(), nnx.Param, ...)

    def loss(weights):
        model = nnx.merge(graph, weights, rest)
        hidden, _, _ = model(jnp.asarray(TOKENS[:, :-1]), Batch.dense(2, TOKENS.shape[1] - 1))
        logp = jax.nn.log_softmax(model.unembed(hidden))
        return -jnp.take_along_axis(logp, TOKENS[:, 1:, None], axis=-1).mean()

    value, gradients = jax.jit(jax.value_and_grad(loss))(weights)
    by_path = {".".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(gradients)}
    return float(value), dict(HF.export(by_path, llm.config))


def theirs(model) -> tuple[float, dict[str, np.ndarray]]:
    """The same of torch; None for parameters that have no gradient."""
    import torch

    tokens = torch.tensor(TOKENS)
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = None if parameter.grad is None else parameter.grad.numpy()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found |= of_experts(name.rpartition(".")[0], name.endswith("down_proj"), gradient)
        else:
            found[name] = gradient
    return loss.item(), found


def of_experts(prefix: str, is_down: bool, stack: np.ndarray) -> dict[str, np.ndarray]:
    """One name for each expert: transformers joins the stacks of gate and up."""
    if is_down:
        return {f"{prefix}.{x}.down_proj.weight": one for x, one in enumerate(stack)}
    halves = {"gate_proj": lambda one: one[: len(one) // 2], "up_proj": lambda one: one[len(one) // 2 :]}
    return {f"{prefix}.{x}.{name}.weight": half(one) for x, one in enumerate(stack) for name, half in halves.items()}


@pytest.mark.parametrize("family", ["v3", "v2"])
def test_gradients_of_every_weight_agree(oracle, tmp_path, family):
    hf = {**models.FAMILIES[family], "num_hidden_layers": 2, "num_nextn_predict_layers": 0}
    folder = models.write(tmp_path, hf, models.tensors(hf))
    loss, found = ours(LLM(folder, dtype="float32"))
    expected_loss, expected = theirs(oracle.load(folder))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert {name for name in found if not name.endswith("e_score_correction_bias")} == expected.keys()
    for name, gradient in found.items():
        if name.endswith("e_score_correction_bias"):  # chooses experts, and has no gradient: a buffer there
            assert not gradient.any()
            continue
        scale = np.abs(expected[name]).max()
        assert scale > 0 or ".experts." in name, name  # an expert that no token chose
        np.testing.assert_allclose(gradient, expected[name], atol=1e-4 * max(scale, 1e-3), err_msg=name)


def test_a_saved_folder_has_the_same_logits_there(oracle, tmp_path):
    hf = {**models.FAMILIES["v3"], "num_hidden_layers": 2, "num_nextn_predict_layers": 0}
    llm = LLM(models.write(tmp_path / "in", hf, models.tensors(hf)))
    llm.update(jax.tree.map(lambda w: 1.1 * w, nnx.state(llm.trainable(), nnx.Param)))
    llm.save(tmp_path / "out")
    expected = llm.logits(TOKENS)
    np.testing.assert_array_equal(LLM(tmp_path / "out").logits(TOKENS), expected)
    np.testing.assert_allclose(oracle.logits(oracle.load(tmp_path / "out"), TOKENS), expected, atol=1e-3)
