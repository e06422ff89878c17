"""kv_b_proj in FP8: its products against float64, and models against the same model dequantised by numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import models
import numpy as np
import pytest
from checkpoints import BLOCK, convert, raw, released
from weights import fp8

from mla_jax import LLM, SamplingParams
from mla_jax.base.axes import parse_mesh
from mla_jax.base.config import Config
from mla_jax.base.qtensor import BY_COLUMN, QTensor
from mla_jax.mesh.devices import Devices
from mla_jax.model.fp8_up import from_latent, stays_fp8, to_latent
from mla_jax.model.mla import FORMS
from mla_jax.model.trainable import trainable
from mla_jax.weights.load import Checkpoint, load

V3 = models.FAMILIES["v3"]
STORED = fp8.quantized(models.tensors(V3, mtp=True), BLOCK)
HEADS, ROWS, RANK = 3, 128, 512  # P and V are 128
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 9, 33, 7], [40, 2, 61, 17, 8, 3, 11, 77, 21]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model in FP8, whose blocks have the 16 rows of a head's half, and the same in float32."""
    packed, plain = (tmp_path_factory.mktemp(name) for name in ("fp8", "f32"))
    return released(packed, "v3", "fp8"), models.write(plain, V3, fp8.dequantized(STORED, BLOCK))


def half(seed: int) -> tuple[QTensor, np.ndarray]:
    """Random codes and scales, and their numbers in float64."""
    rng = np.random.default_rng(seed)
    codes = rng.standard_normal((HEADS, ROWS, RANK)).astype(ml_dtypes.float8_e4m3fn)
    blocks = rng.uniform(0.5, 2, (HEADS, RANK // 128)).astype(np.float32) / 300
    scale = np.repeat(blocks, 128, axis=1)
    packed = QTensor(BY_COLUMN, (jnp.asarray(codes), jnp.asarray(scale)), codes.shape)
    return packed, codes.astype(np.float64) * scale.astype(np.float64)[:, None]


PRODUCTS = [(to_latent, "btnp,npr->btnr", ROWS), (lambda o, uv: from_latent(o, uv, o.dtype), "btnr,nvr->btnv", RANK)]


@pytest.mark.parametrize("rows", [1, 5, ROWS + 1])
@pytest.mark.parametrize(("product", "mix", "width"), PRODUCTS, ids=["to_latent", "from_latent"])
def test_products_are_exact_in_float32_and_in_bfloat16_as_good_as_with_rounded_weights(product, mix, width, rows):
    packed, numbers = half(0)
    given = np.random.default_rng(1).standard_normal((rows, 1, HEADS, width))

    def error(dtype: jnp.dtype, weight: QTensor | jax.Array) -> float:
        x = jnp.asarray(given, dtype)
        wanted = np.einsum(mix, np.asarray(x, np.float64), numbers)
        found = np.asarray(jax.jit(product)(x, weight), np.float64)
        return float(np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean()))

    assert error(jnp.float32, packed) < 1e-6
    assert error(jnp.bfloat16, packed) <= 1.02 * error(jnp.bfloat16, jnp.asarray(numbers, jnp.bfloat16))


@pytest.mark.parametrize(
    ("preset", "format", "stays"),
    [
        ("v3", "fp8_block", True),
        ("kimi_k2", "fp8_block", True),
        ("v3", "fp8_block_64x128", False),
        ("v3", "fp8_row", False),
        ("v3", "BF16", False),
        ("glm_4_7_flash", "fp8_block", False),
    ],
)
def test_it_stays_in_fp8_where_no_block_has_rows_of_two_halves(preset, format, stays):
    assert stays_fp8(format, Config.preset(preset)) is stays


def test_codes_are_the_files_own_and_every_number_is_that_of_the_dequantised_model(folders):
    packed, plain = folders
    ours, theirs = load(packed), load(plain)
    for i, (one, other) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        uk, uv = one.attn.uk[...], one.attn.uv[...]
        assert (uk.format, uv.format) == (BY_COLUMN, BY_COLUMN)
        joined = np.concatenate([uk.parts[0], uv.parts[0]], axis=1).reshape(-1, 32)
        codes = STORED[f"model.layers.{i}.self_attn.kv_b_proj.weight"]
        np.testing.assert_array_equal(joined.view(np.uint8), codes.view(np.uint8))
        for mine, its in ((uk, other.attn.uk[...]), (uv, other.attn.uv[...])):
            numbers = np.asarray(mine.parts[0], np.float32) * np.asarray(mine.parts[1])[:, None]
            np.testing.assert_array_equal(numbers, its)
    for one, other in zip(jax.tree.leaves(trainable(ours).layers[1].attn), jax.tree.leaves(theirs.layers[1].attn), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("form", [*(pytest.param(form, marks=pytest.mark.deep) for form in FORMS), "auto"])
def test_every_form_gives_the_logits_and_greedy_tokens_of_the_dequantised_model(folders, form):
    ours, theirs = (LLM(folder, attention=form) for folder in folders)
    wanted = theirs.logits(PROMPTS[1:])
    assert np.abs(ours.logits(PROMPTS[1:]) - wanted).max() < 1e-4 * wanted.std()
    found, expected = (llm.generate(PROMPTS, GREEDY) for llm in (ours, theirs))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert ours.plan.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(ours.model))


@pytest.mark.deep
@pytest.mark.parametrize("options", [{"retrieve": "infllm", "retrieve_tokens": 256}, {"evict": "critical", "evict_keep": 0.3}])
def test_pages_are_chosen_and_tokens_are_dropped_as_in_the_dequantised_model(folders, options):
    """By queries that `uk` has taken to latents, and by values that `uv` makes of these."""
    long = [np.random.default_rng(0).integers(2, 90, 400).tolist()]
    found = [LLM(folder, **options).generate(long, GREEDY)[0].token_ids for folder in folders]
    assert found[0] == found[1]


def test_heads_on_a_mesh_have_their_own_codes_and_scales(folders):
    packed, _ = folders
    one = Checkpoint(packed).load()
    checkpoint = Checkpoint(packed, devices=Devices.of(parse_mesh("tensor=2"), None))
    uk = checkpoint.load().layers[0].attn.uk[...]
    for array, whole in zip(uk.parts, one.layers[0].attn.uk[...].parts, strict=True):
        np.testing.assert_array_equal(np.asarray(array, np.float32), np.asarray(whole, np.float32))
        assert {shard.data.shape[0] for shard in array.addressable_shards} == {2}  # of 4 heads
    tokens = [LLM(packed, mesh=mesh).generate(PROMPTS, GREEDY) for mesh in (None, "tensor=2")]
    assert [one.token_ids for one in tokens[0]] == [one.token_ids for one in tokens[1]]


def test_a_conversion_and_back_has_the_same_codes_and_scales(folders, tmp_path):
    packed, _ = folders
    assert convert(packed, tmp_path / "orbax") == 0
    assert convert(tmp_path / "orbax", tmp_path / "back", "--to", "hf") == 0
    before, after = ({name: t for name, t in raw(folder).items() if "kv_b" in name} for folder in (packed, tmp_path / "back"))
    assert before == after
    assert len(before) == 2 * 4  # three layers and that for drafts
    model = load(tmp_path / "orbax")
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(load(packed)), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_explain_says_whether_it_stays_in_fp8(folders, tmp_path):
    packed, plain = folders
    assert "kv_b_proj: stays in FP8" in LLM(packed).explain()
    assert "kv_b_proj" not in LLM(plain).explain()
    assert "kv_b_proj" not in LLM(packed, dtype="float32").explain()
    crossing = LLM(released(tmp_path, "glm_4_7_flash", "fp8"))
    assert not isinstance(crossing.model.layers[0].attn.uk[...], QTensor)
    said = "unpacked to float32 while loading; blocks of 16 rows do not fit the 24 + 32 rows of a head"
    assert f"kv_b_proj: {said}" in crossing.explain()
