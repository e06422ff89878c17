"""The names table against the names and shapes that tests/models.py writes down on its own."""

import models
import numpy as np
import pytest
from flax import nnx

from mla_jax.base import axes
from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile
from mla_jax.model.transformer import Transformer
from mla_jax.weights import names
from mla_jax.weights.deepseek import DEEPSEEK
from mla_jax.weights.hf_names import HF, table_of

COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # what MTP layers repeat


def paths(config: Config, mtp: bool) -> list[str]:
    """Our parameters' paths, without making them."""
    state = nnx.state(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), mtp=mtp)))
    return [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]


def released(hf: dict, mtp: bool) -> dict[str, tuple[int, ...]]:
    """The tensors that a release holds and a model needs."""
    first = hf["num_hidden_layers"]
    return {n: s for n, s in models.shapes(hf, mtp).items() if not (n.endswith(COPIES) and f"layers.{first}." in n)}


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_parameter_has_the_released_name_and_shape(family, mtp):
    hf = models.FAMILIES[family]
    config = Config.from_hf(hf)
    sources = [table_of(config).find(path, config) for path in paths(config, mtp and config.num_nextn_predict_layers > 0)]
    found = {name: axes.shape(config, source.axes) for source in sources for name in source.names}
    assert found == released(hf, mtp)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_released_tensor_is_used_or_known_to_be_needless(family):
    hf = models.FAMILIES[family]
    config, present = Config.from_hf(hf), models.tensors(hf, mtp=True)
    present |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4) for i in range(3)}
    table = table_of(config)
    mtp = table.has_mtp(config, present)
    assert mtp == (hf.get("num_nextn_predict_layers", 0) > 0)
    table.resolve(paths(config, mtp), config, present)


def test_norms_of_dense_layers_that_experts_alone_pass_through_are_needless():
    hf = models.FAMILIES["axk1"]
    config, present = Config.from_hf(hf), models.tensors(hf)
    present |= {"model.layers.0.post_mlp_layernorm.weight": np.ones(hf["hidden_size"])}
    HF.resolve(paths(config, False), config, present)


def test_a_parameter_that_a_kind_of_checkpoint_does_not_hold_is_named():
    config = Config.from_hf(models.FAMILIES["axk1"])
    with pytest.raises(BadFile, match=r"layers\.1\.mlp_post_norm, which checkpoints of this kind do not hold"):
        DEEPSEEK.resolve(paths(config, False), config, {})


def test_halves_of_kv_b_proj_are_keys_then_values_of_each_head():
    config = Config.from_hf({**models.FAMILIES["v3"], "qk_nope_head_dim": 2, "v_head_dim": 3})
    rows = np.array([f"{part}{i} of head {head}" for head in range(4) for part, n in (("k", 2), ("v", 3)) for i in range(n)])[
        :, None
    ]
    assert names.key_half(rows, config)[..., 0].tolist() == [[f"k{i} of head {head}" for i in range(2)] for head in range(4)]
    assert names.value_half(rows, config)[..., 0].tolist() == [[f"v{i} of head {head}" for i in range(3)] for head in range(4)]


def test_halves_of_a_joined_expert_are_gate_then_up():
    config, w = Config.from_hf(models.FAMILIES["v3"]), np.arange(6 * 4).reshape(6, 4)
    np.testing.assert_array_equal(names.first_half(w, config), w[:3])
    np.testing.assert_array_equal(names.second_half(w, config), w[3:])


def test_without_a_checkpoint_the_released_names_are_taken():
    config = Config.from_hf(models.FAMILIES["v3"])
    assert HF.find("layers.1.mlp.experts.up", config).names[7] == "model.layers.1.mlp.experts.7.up_proj.weight"


def test_the_layout_of_which_all_tensors_are_there_is_taken():
    config = Config.from_hf(models.FAMILIES["v3"])
    joined = HF.find("layers.1.mlp.experts.up", config, {"model.layers.1.mlp.experts.gate_up_proj": None})
    assert joined.names == ("model.layers.1.mlp.experts.gate_up_proj",)
    assert [piece.index for piece in joined.pieces] == list(range(8))


def test_all_that_is_missing_or_not_used_is_listed_once():
    hf = models.FAMILIES["youtu"]
    config, present = Config.from_hf(hf), models.tensors(hf)
    del present["model.norm.weight"], present["model.layers.2.mlp.up_proj.weight"]
    present["model.layers.2.mlp.upper_proj.weight"] = present["model.norms.weight"] = np.ones(2)
    with pytest.raises(BadFile) as caught:
        HF.resolve(paths(config, False), config, present)
    lines = str(caught.value).split("\n  ")
    assert sorted(lines[1:]) == [
        "missing: model.layers.2.mlp.up_proj.weight (not used, but similar: model.layers.2.mlp.upper_proj.weight)",
        "missing: model.norm.weight (not used, but similar: model.norms.weight)",
        "not used: model.layers.2.mlp.upper_proj.weight",
        "not used: model.norms.weight",
    ]


def test_twenty_wrong_shapes_are_listed_in_a_few_lines():
    hf = models.FAMILIES["v3"]
    config, present = Config.from_hf({**hf, "hidden_size": 64}), models.tensors(hf)
    with pytest.raises(BadFile) as caught:
        HF.resolve(paths(config, False), config, present)
    lines = str(caught.value).split("\n")
    assert 10 < len(lines) < 20
    assert all("hidden_size 64" in line for line in lines[1:-1])
    assert lines[-1].endswith("more")
