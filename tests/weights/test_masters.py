"""A trainer's weights in the formats of a model: as a folder of the same numbers holds them, or one error and nothing changed."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import convert
from flax import nnx
from models import FAMILIES, tensors, write
from weights import fp8, packed_models, parameters

from mla_jax.base import qtensor
from mla_jax.base.errors import BadRequest, Unsupported
from mla_jax.base.qtensor import BY_COLUMN, QTensor
from mla_jax.model.trainable import trainable
from mla_jax.weights.load import load
from mla_jax.weights.masters import as_held

HF = {**FAMILIES["v3"], "num_hidden_layers": 2, "num_nextn_predict_layers": 0}
BLOCK = (16, 24)  # a head's halves have 16 rows each


def plain(folder: Path, seed: int) -> Path:
    return write(folder / f"plain{seed}", HF, tensors(HF, seed))


def in_fp8(folder: Path, seed: int) -> Path:
    """Quantised by the tests' own code."""
    hf = HF | {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK)}}
    return write(folder / f"fp8{seed}", hf, fp8.quantized(tensors(HF, seed), BLOCK))


def converted(dtype: str):
    def made(folder: Path, seed: int) -> Path:
        out = folder / f"{dtype}{seed}"
        assert convert(plain(folder / "in", seed), out, "--dtype", dtype) == 0
        return out

    return made


FORMATS = {"plain": plain, "fp8": in_fp8, **{dtype: converted(dtype) for dtype in ("int8", "int4_g32", "q4_k")}}


def masters(folder: Path, seed: int = 1) -> nnx.State:
    return nnx.state(trainable(load(plain(folder / "masters", seed), dtype="float32")), nnx.Param)


@pytest.mark.parametrize(
    "made", [pytest.param(name, marks=pytest.mark.deep if name in ("int8", "int4_g32") else ()) for name in FORMATS]
)
def test_numbers_become_the_parts_that_a_folder_of_them_holds(tmp_path, made):
    model, expected = load(FORMATS[made](tmp_path, 0)), parameters.state(load(FORMATS[made](tmp_path, 1)))
    formats = {v.format for v in jax.tree.leaves(expected, is_leaf=lambda v: isinstance(v, QTensor)) if isinstance(v, QTensor)}
    assert (formats == set()) == (made == "plain")
    assert made != "fp8" or BY_COLUMN in formats
    weights = masters(tmp_path)
    if made == "fp8":  # whose other weights are in bfloat16
        packed = jax.tree.map(lambda v: isinstance(v, QTensor), expected, is_leaf=lambda v: isinstance(v, QTensor))
        exact = {path for path, v in nnx.to_flat_state(weights) if v.get_metadata()["exact"]}
        flat = dict(nnx.to_flat_state(packed))
        rounded = [
            (path, v if flat[path].get_raw_value() or path in exact else v.replace(v[...].astype(jnp.bfloat16)))
            for path, v in nnx.to_flat_state(weights)
        ]
        weights = nnx.from_flat_state(rounded)
    found = as_held(model, weights)
    wanted = {".".join(map(str, path)): v.get_raw_value() for path, v in nnx.to_flat_state(expected)}
    assert found.keys() == wanted.keys()
    for path, value in found.items():
        assert jax.tree.structure(value) == jax.tree.structure(wanted[path]), path
        for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(wanted[path]), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=path)


@pytest.mark.deep
def test_weights_for_a_kernel_are_reordered_too(tmp_path):
    model = load(packed_models.written(tmp_path, "int8"))
    gate, experts = model.layers[0].mlp.gate, model.layers[1].mlp.experts.gate
    weights = nnx.state(trainable(model), nnx.Param)
    expected = [as_held(model, weights)[path] for path in ("layers.0.mlp.gate", "layers.1.mlp.experts.gate")]
    for one in (gate, experts):
        one.set_raw_value(qtensor.reorder(one.get_raw_value()))
    found = as_held(model, weights)
    for path, stored in zip(("layers.0.mlp.gate", "layers.1.mlp.experts.gate"), expected, strict=True):
        assert found[path].reordered
        for a, b in zip(qtensor.reorder(stored).parts, found[path].parts, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_copy_stays_when_the_trainer_donates_its_arrays(tmp_path):
    model, weights = load(plain(tmp_path, 0)), masters(tmp_path)
    found, expected = as_held(model, weights), np.asarray(weights["embed"][...])
    weights["embed"][...].delete()
    np.testing.assert_array_equal(found["embed"], expected)
    with pytest.raises(BadRequest, match="embed is deleted: it was donated"):
        as_held(model, weights)


def changed(state: nnx.State, path: str, change) -> nnx.State:
    flat = [(keys, v.replace(change(v.get_raw_value())) if ".".join(map(str, keys)) == path else v)
            for keys, v in nnx.to_flat_state(state)]  # fmt: skip
    return nnx.from_flat_state(flat)


WRONG = {
    "no state": (lambda state: {"embed": 1}, r"expected an nnx.State\n  nnx.state\(llm.trainable"),
    "a parameter less": (lambda state: nnx.from_flat_state(list(nnx.to_flat_state(state))[1:]), "missing: embed"),
    "one more": (
        lambda state: nnx.from_flat_state([*nnx.to_flat_state(state), (("bias",), nnx.Param(jnp.ones(1)))]),
        "not of this model: bias",
    ),
    "another shape": (
        lambda state: changed(state, "embed", lambda w: w[:90]),
        r"embed is float32 \[90, 48\], expected .*\[96, 48\]",
    ),
    "integers": (lambda state: changed(state, "norm", lambda w: w.astype(jnp.int32)), "norm is int32 .*, expected floating"),
    "a list": (lambda state: changed(state, "norm", lambda w: w.tolist()), "norm is a list, expected an array"),
    "NaN": (lambda state: changed(state, "head", lambda w: w.at[3, 4].set(jnp.nan)), "hold NaN or infinity\n  head"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_weights_that_do_not_fit_are_one_error(tmp_path, wrong):
    change, words = WRONG[wrong]
    with pytest.raises(BadRequest, match=words):
        as_held(load(plain(tmp_path, 0)), change(masters(tmp_path)))


def test_a_number_that_is_finite_in_the_trainer_alone_is_refused(tmp_path):
    model = load(plain(tmp_path, 0), dtype="bfloat16")
    weights = changed(masters(tmp_path), "head", lambda w: w.at[0, 0].set(3.4e38))
    with pytest.raises(BadRequest, match="hold NaN or infinity\n  head"):
        as_held(model, weights)


def test_formats_that_are_only_read_are_refused_by_their_names(tmp_path):
    model = load(packed_models.written(tmp_path, "gguf"))
    with pytest.raises(Unsupported, match=r"cannot be quantised to .*Q6_K(.|\n)*is in Q8_0; known: fp8_block"):
        as_held(model, nnx.state(trainable(model), nnx.Param))
