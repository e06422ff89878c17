"""The mesh that is taken where the user leaves the choice: as much data as fits, then tensor, and why in words."""

import pytest

from mla_jax import LLM
from mla_jax.base.config import Config
from mla_jax.base.options import Options
from mla_jax.engine.opening.opened import open_model
from mla_jax.weights import plan as planning
from mla_jax.weights.auto_mesh import choose_mesh

NO_EXPERTS = ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "moe_intermediate_size")


def config(heads: int = 8, experts: int | None = 16) -> Config:
    moe = {"n_routed_experts": experts, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}
    return Config.preset("tiny", num_attention_heads=heads, **(moe if experts else dict.fromkeys(NO_EXPERTS)))


def chosen(config: Config, count: int, least: int = 1) -> tuple[dict[str, int], str, list[int]]:
    """The mesh chosen if one fits with at least `least` devices along tensor; also the tried numbers."""
    tried: list[int] = []

    def fits(sizes) -> bool:
        tried.append(sizes["tensor"])
        return sizes["tensor"] >= least

    return *choose_mesh(config, count, fits), tried


def test_data_is_preferred_because_no_latent_is_held_twice():
    sizes, why, tried = chosen(config(), 8)
    assert sizes == {"data": 8, "tensor": 1}
    assert tried == [1]
    assert why == "mesh data=8: each device has the latents of its own rows, and no latent is held twice"


@pytest.mark.parametrize(("least", "expected"), [(2, (4, 2)), (3, (2, 4)), (8, (1, 8))])
def test_else_the_smallest_tensor_that_fits_is_taken(least, expected):
    sizes, why, tried = chosen(config(), 8, least)
    assert tuple(sizes.values()) == expected
    assert tried == [n for n in (1, 2, 4, 8) if n <= expected[1]]
    assert f"{expected[1]} devices each copy the latents of their rows" in why


def test_where_nothing_fits_each_device_gets_the_smallest_part():
    sizes, why, _ = chosen(config(), 8, least=100)
    assert sizes == {"data": 1, "tensor": 8}
    assert "nothing fits" in why


def test_only_tensors_that_divide_the_heads_are_tried():
    sizes, _, tried = chosen(config(heads=6, experts=24), 12, least=100)
    assert tried == [1, 2, 3, 6]
    assert sizes == {"data": 2, "tensor": 6}


def test_devices_that_have_no_equal_part_of_the_experts_are_idle():
    sizes, why, _ = chosen(config(experts=12), 8)
    assert sizes == {"data": 6, "tensor": 1}
    assert why.endswith("; 2 of 8 devices have no equal part of 12 experts")


def test_one_device_is_a_mesh_of_one_and_nothing_is_tried():
    sizes, why, tried = chosen(config(), 1)
    assert sizes == {"data": 1, "tensor": 1}
    assert not tried
    assert why == "mesh data=1: there is one device that can be used"


def test_a_model_without_experts_takes_all_devices():
    sizes, why, _ = chosen(config(experts=None), 7)
    assert sizes == {"data": 7, "tensor": 1}
    assert "no latent is held twice" in why


def test_the_reason_is_a_note_and_a_line_of_the_explanation():
    opened = open_model(Options.of(mesh="auto"))  # the demo model has four experts
    assert opened.checkpoint.devices.sizes == {"data": 4, "tensor": 1, "context": 1}
    (why,) = [note for note in opened.notes if note.startswith("mesh ")]
    assert "no latent is held twice; 4 of 8 devices have no equal part of 4 experts" in why
    assert why in opened.explain()
    assert opened.plan.mesh == "data=4"


@pytest.mark.deep
def test_what_the_plan_of_a_device_says_decides(monkeypatch):
    alone, two, four = (open_model(Options.of(mesh=mesh, context=512)).plan for mesh in ("data=4", "data=2,tensor=2", "tensor=4"))
    assert alone.needed > two.needed > four.needed
    for available, mesh in ((alone.needed, "data=4"), (alone.needed - 1, "data=2,tensor=2"), (two.needed - 1, "tensor=4")):
        monkeypatch.setattr(planning, "available", lambda devices, available=available: available)
        assert open_model(Options.of(mesh="auto", context=512)).plan.mesh == mesh


def test_of_a_mesh_that_is_asked_for_the_explanation_says_so():
    opened = open_model(Options.of(mesh="data=2"))
    assert "mesh data=2: as asked" in opened.explain()
    assert not any(note.startswith("mesh") for note in opened.notes)


def test_without_a_mesh_nothing_is_said_of_one():
    assert not any("mesh" in line for line in [*LLM().explain(), *open_model(Options()).plan.lines()])
