"""Logical axes: shapes from the config, and the mesh axes that shard them."""

import pytest

from mla_jax.base import axes
from mla_jax.base.config import Config

CONFIG = Config.preset("tiny", num_attention_heads=4, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, kv_lora_rank=32)


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        (("heads*nope", "kv_rank"), (64, 32)),
        (("heads*query",), (4 * (16 + 8),)),
        (("heads*up", "latent"), (4 * (16 + 12), 32 + 8)),
        ((), ()),
    ],
)
def test_a_word_is_a_product_of_axes(words, shape):
    assert axes.shape(CONFIG, words) == shape


def test_the_config_fields_behind_a_size_are_named_once_each():
    assert axes.why(CONFIG, "query*nope") == "qk_nope_head_dim 16, qk_rope_head_dim 8"


def test_every_mesh_axis_shards_logical_axes_that_exist():
    assert axes.MESH.keys() <= axes.AXES.keys()
    assert {axis for cut in axes.MESH.values() for axis in cut} == set(axes.MESH_AXES)


def test_a_product_is_sharded_along_its_first_axis():
    assert axes.partition(("heads*nope", "nope*heads", "experts", "model")) == (
        ("tensor",),
        (),
        ("data", "tensor", "context"),
        (),
    )
