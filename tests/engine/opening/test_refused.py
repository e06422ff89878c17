"""Options that a mesh does not support are refused by name, before anything is allocated."""

import pytest

from mla_jax import LLM
from mla_jax.base.errors import Unsupported
from mla_jax.base.options import Options
from mla_jax.engine.opening.opened import open_model
from mla_jax.engine.opening.refused import REFUSED, refuse_on_mesh
from mla_jax.mesh.partition import Layout

CASES = {
    "retrieve": ({"retrieve": "quest"}, "data=2,context=2"),
    "evict": ({"evict": "snapkv"}, "context=2"),
    "host_cache": ({"host_cache": 0.01}, "data=2"),
    'experts="host"': ({"experts": "host"}, "tensor=2"),
    'evict with attention="naive"': ({"evict": "snapkv", "attention": "naive"}, "tensor=2"),
    'attention="fused" with kv_cache="fp8"': ({"attention": "fused", "kv_cache": "fp8"}, "context=2"),
}


def test_every_row_of_the_table_is_tried():
    assert list(CASES) == [what for _, what, _ in REFUSED]


@pytest.mark.parametrize("what", CASES)
def test_it_is_refused_by_name_with_the_mesh_and_what_to_do(what, monkeypatch):
    options, mesh = CASES[what]
    monkeypatch.setattr("mla_jax.engine.opening.opened.Checkpoint", lambda *_, **__: pytest.fail("a checkpoint was opened"))
    advice = next(advice for _, name, advice in REFUSED if name == what)
    for make in (LLM, lambda **fields: open_model(Options.of(**fields))):
        with pytest.raises(Unsupported) as refused:
            make(mesh=mesh, **options)
        assert refused.value.args == (f"{what} is not available on the mesh {mesh}", advice)


@pytest.mark.parametrize("what", CASES)
def test_one_device_computes_it(what):
    options, _ = CASES[what]
    refuse_on_mesh(Options.of(**options), Layout())


def test_a_mesh_that_is_chosen_for_the_user_is_held_to_the_same(monkeypatch):
    monkeypatch.setattr("mla_jax.weights.auto_mesh.choose", lambda *_: ({"data": 2, "tensor": 2}, "why"))
    with pytest.raises(Unsupported, match="not available on the mesh data=2,tensor=2"):
        open_model(Options.of(mesh="auto", evict="snapkv", attention="naive"))
