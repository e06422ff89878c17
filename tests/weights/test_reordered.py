"""Packed weights on a Hopper GPU: reordered as they are loaded, multiplied by kernels. Here the fallbacks stand in for these."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from weights import parameters
from weights.packed_models import written

from mla_jax import Transformer
from mla_jax.base import qtensor
from mla_jax.base.batch import Batch
from mla_jax.base.errors import BadFile, Unsupported
from mla_jax.base.qtensor import QTensor
from mla_jax.base.roofline import DEVICES
from mla_jax.engine.opening.explain import explain
from mla_jax.model import kernels, ops
from mla_jax.model.dispatch import Dispatch
from mla_jax.weights.load import Checkpoint, _is_stored
from mla_jax.weights.plan import memory_plan
from pallas_kernels import packed

H200 = Dispatch(device=DEVICES["NVIDIA H200"])


def tensors(model: Transformer) -> dict[str, QTensor]:
    leaves = jax.tree.leaves_with_path(parameters.state(model), is_leaf=lambda leaf: isinstance(leaf, QTensor))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, QTensor)}


def logits(model: Transformer, count: int = 12) -> np.ndarray:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 96, (1, count)))
    graph, state = nnx.split(model)

    @jax.jit
    def run(state):
        model = nnx.merge(graph, state)
        return model.unembed(model(tokens, Batch.dense(1, count))[0])

    return np.asarray(run(state))


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["fp8", "int8", "gguf"])
def test_reordered_weights_are_the_files_and_give_its_logits(tmp_path, hopper, kind):
    path = written(tmp_path, kind)
    stored = Checkpoint(path, dispatch=H200).load()
    expected, as_stored = logits(stored), tensors(stored)
    assert not any(w.reordered for w in as_stored.values())

    taken = hopper()
    checkpoint = Checkpoint(path, dispatch=H200)
    model = checkpoint.load()
    found = tensors(model)
    assert found.keys() == as_stored.keys()
    for name, w in found.items():
        before = as_stored[name]
        assert w.reordered == ("embed" not in name and packed.why_not(before.format, w.shape) is None), name
        qtensor.validated(w, name)
    for name in [name for name in found if "down" in name]:
        for one, other in zip(qtensor.restore(found[name]).parts, as_stored[name].parts, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), name
    planned = memory_plan(checkpoint)
    assert planned.weights == sum(a.nbytes for a in jax.tree.leaves(parameters.state(model)))

    assert {model.dispatch.backend_name(model, tokens) for tokens in (1, 8, 2048)} == {"ragged"}
    got = logits(model)
    assert {"quantized_matmul", "ragged_dot"} <= {*taken}
    np.testing.assert_allclose(got, expected, atol=0.03 * np.abs(expected).max())
    said = "\n".join(explain(model, checkpoint.formats(), planned))
    assert " reordered, " in said
    assert "multiplied by a kernel that unpacks them in registers" in said


def test_a_gguf_files_tensors_keep_their_formats_and_their_order_where_rows_do_not_allow_another(tmp_path, hopper):
    path = written(tmp_path, "gguf")
    hopper()
    checkpoint = Checkpoint(path, dispatch=H200)
    read = checkpoint.parameters()
    at = "layers.1.mlp.experts."
    assert [read[at + name].format for name in ("gate", "up", "down")] == [f"{k} reordered" for k in ("Q5_K", "Q6_K", "Q8_0")]
    assert read["layers.1.attn.q_b_proj"].format == "Q8_0"  # 64 numbers in a row
    assert (read["embed"].format, read["head"].format) == ("Q4_K", "Q4_K reordered")
    checkpoint.stored[at + "down"] = "Q4_0"  # which the kernel does not take: then all experts stay
    assert not any("experts" in path for path in checkpoint._reordered())


def test_nothing_is_reordered_on_a_cpu_or_with_a_dtype_asked_for(tmp_path, hopper):
    path = written(tmp_path, "gguf")
    assert not Checkpoint(path, dispatch=H200).reordered
    hopper()
    assert Checkpoint(path, dispatch=H200).reordered
    assert not Checkpoint(path, dispatch=H200, dtype="bfloat16").reordered
    assert not Checkpoint(path).reordered  # computes in float32, which no kernel takes


@pytest.mark.deep
@pytest.mark.parametrize("shape", [(3, 136, 256), (136, 256)])
def test_rows_and_one_of_a_stack_and_infinities_are_found_in_any_order(shape):
    parts = packed.random_parts("Q6_K", shape)
    q = QTensor("Q6_K", parts, shape)
    w = qtensor.reorder(q)
    assert w.nbytes == qtensor.nbytes("Q6_K reordered", shape)
    np.testing.assert_array_equal(qtensor.dequantize(w), qtensor.dequantize(q))
    np.testing.assert_array_equal(ops.take(w, jnp.array([1, 0])), ops.take(q, jnp.array([1, 0])))
    if len(shape) == 3:
        np.testing.assert_array_equal(qtensor.dequantize(w.one(2)), qtensor.dequantize(q.one(2)))
    assert qtensor.restore(q) is q
    infinite = QTensor("Q6_K", (parts[0].at[..., 5, 0, 209].set(0x7C),), shape)
    assert qtensor.unsound(w.format, w.parts) == 0
    assert qtensor.unsound(w.format, qtensor.reorder(infinite).parts) == qtensor.unsound("Q6_K", infinite.parts) > 0


def test_what_cannot_be_reordered_is_refused():
    with pytest.raises(BadFile, match=r"(?s)no Q4_K reordered tensor has the shape \[8, 128\].*multiples of 256"):
        qtensor.abstract("Q4_K reordered", (8, 128))
    with pytest.raises(Unsupported, match="no quantised format Q4_0 reordered"):
        qtensor.abstract("Q4_0 reordered", (8, 256))


@pytest.mark.deep
def test_rows_in_float32_are_multiplied_by_what_is_unpacked(hopper):
    taken = hopper()
    q = QTensor("Q4_K", packed.random_parts("Q4_K", (64, 256)), (64, 256))
    x = jax.random.normal(jax.random.key(0), (5, 256))
    got, expected = (kernels.linear(x, w) for w in (qtensor.reorder(q), q))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert not taken
    kernels.linear(x.astype(jnp.bfloat16), qtensor.reorder(q), out="float32")
    assert taken == ["quantized_matmul"]


def test_a_file_may_not_claim_to_be_in_a_kernels_order():
    assert _is_stored("Q4_K")
    assert not _is_stored("Q4_K" + qtensor.REORDERED)
    assert not _is_stored("Q9_X")
