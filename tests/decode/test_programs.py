"""Programs are traced once for all layers of one structure, and not at all where an earlier process has stored them."""

import dataclasses
import os
import re
import secrets
import threading
import time

import jax
import numpy as np
import pytest
from flax import nnx
from models import FAMILIES, tensors, write
from own_names import own_names_go

from mla_jax.cache.evict import Ada, Budget, Critical, SnapKV
from mla_jax.decode import store
from mla_jax.decode.evict_programs import Selection
from mla_jax.decode.loop import Programs, ProgramShape
from mla_jax.decode.model_weights import Weights
from mla_jax.decode.programs import Program, Waits
from mla_jax.decode.rows import ADMITTED, default_entries
from mla_jax.engine.core.stats import between
from mla_jax.model import mla
from mla_jax.model.kernels import load_runtime
from mla_jax.weights.load import load
from pallas_kernels import choice

LAYERS, SPARSE = 4, 3
WORK = re.compile(r"/jax/core/compile/(jaxpr_trace|jaxpr_to_mlir_module|backend_compile)_duration")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS - SPARSE}
    return load(write(tmp_path_factory.mktemp("v3"), hf, tensors(hf)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache") / "programs"


@pytest.fixture(scope="module", autouse=True)
def version():
    """As if the code were another in each session: what JAX has in a cache of longer life cannot be stored again."""
    unique = store.code() + secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "code", lambda: unique)
        yield


@pytest.fixture(scope="module")
def expected(model, folder) -> np.ndarray:
    """The tokens of a first start, which fills the folder."""
    found = generated(Programs(model, folder=folder))
    assert {path.name.partition("-")[0] for path in folder.iterdir()} == {"new", "prefill", "admit", "run"}
    return found


@pytest.fixture
def work():
    """The names of programs that JAX traces, lowers or compiles meanwhile."""
    names = []

    def listen(event: str, seconds: float, **about) -> None:
        if WORK.match(event):
            names.append(about.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


AT, TABLE = np.zeros(1, np.int32), np.arange(2, dtype=np.int32)[None]


def generated(programs: Programs) -> np.ndarray:
    """One row's sampled continuation of 16 tokens."""
    pool, rows = programs.new(1, 2)
    programs.prepare(pool, rows, SHAPES)
    entry = default_entries(ADMITTED)
    ones = np.ones(ADMITTED, np.int32)
    warm = dataclasses.replace(entry.sampling, temperature=np.ones(ADMITTED, np.float32))
    entry = dataclasses.replace(entry, prompt=16 * ones, limit=20 * ones, sampling=warm)
    rows = programs.admit(rows, np.arange(ADMITTED, dtype=np.int32), entry)
    tokens = np.arange(16, dtype=np.int32) + 5
    pool, rows, _ = programs.prefill(pool, rows, AT, tokens, np.array([16], np.int32), TABLE, None)
    return programs.run(pool, rows, AT, TABLE, np.int32(20))[2].tokens().tokens


SHAPES = [
    ProgramShape("run", width=2, rows=1),
    ProgramShape("prefill", width=2, line=16, pieces=1),
    ProgramShape("admit", rows=ADMITTED),
]


@pytest.mark.deep
def test_a_second_start_traces_and_compiles_nothing_and_chooses_the_same_tokens(model, folder, expected, work):
    found = generated(Programs(model, folder=folder))
    np.testing.assert_array_equal(found, expected)
    assert not [name for name in work if re.search("^(new|prefill|admit|run)", str(name))]


@pytest.mark.deep
@pytest.mark.usefixtures("expected")
def test_xla_s_account_of_a_program_is_kept_with_it(model, folder):
    first, second = Programs(model), Programs(model, folder=folder)
    assert first.temporaries == 0
    for programs in (first, second):
        generated(programs)
    program = first.run.lower(*first.new(1, 2), AT, TABLE, np.int32(20)).compile().memory_analysis()
    assert first.run.temporaries >= program.temp_size_in_bytes > 0
    assert second.temporaries == first.temporaries >= first.run.temporaries


@pytest.mark.deep
def test_stored_tokens_are_those_of_programs_that_are_not_stored(model, expected):
    np.testing.assert_array_equal(generated(Programs(model)), expected)


@pytest.mark.deep
@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: b""]
)
def test_a_damaged_file_is_ignored(model, folder, expected, damage):
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    for path, data in kept.items():
        path.write_bytes(damage(data))
    try:
        np.testing.assert_array_equal(generated(Programs(model, folder=folder)), expected)
    finally:
        for path, data in kept.items():
            path.write_bytes(data)


@pytest.mark.deep
def test_a_folder_that_others_may_write_is_not_read(model, folder, expected, monkeypatch):
    folder.chmod(0o770)
    monkeypatch.setattr("pickle.loads", lambda *_: pytest.fail("a file was read"))
    try:
        np.testing.assert_array_equal(generated(Programs(model, folder=folder)), expected)
    finally:
        folder.chmod(0o700)


def test_a_folder_that_cannot_be_made_stops_nothing(model, tmp_path, expected):
    (tmp_path / "file").write_text("in the way")
    np.testing.assert_array_equal(generated(Programs(model, folder=tmp_path / "file" / "programs")), expected)


def test_programs_of_other_code_or_another_setting_have_other_names(model, folder, monkeypatch):
    kept = store.ProgramStore.of(folder, model)
    name = kept.name("run", "x")
    assert name == store.ProgramStore.of(folder, model).name("run", "x") != kept.name("run", "y")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert kept.name("run", "x") != name
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(store, "code", lambda: "another")
    assert kept.name("run", "x") != name


def test_programs_with_code_of_a_users_own_are_not_stored(model, folder):
    def remembers(c_kv, k_pe, up, x=None):
        return mla.latents(c_kv, k_pe, up, x)

    with own_names_go():
        mla.register_form("mine", mla.Form(remembers, mla.move_elided))
        own = nnx.merge(*nnx.split(model))
        own.dispatch = dataclasses.replace(model.dispatch, attention="mine")
        assert store.ProgramStore.of(folder, own) is None
        own.dispatch = dataclasses.replace(model.dispatch, attention="absorbed", experts="dense")
        assert store.ProgramStore.of(folder, own) is not None


@dataclasses.dataclass(frozen=True)
class Peak(SnapKV):
    def of_block(self, seen):
        return seen.weights.max(1)


@pytest.mark.parametrize(
    ("policy", "budget", "stored"),
    [(SnapKV(), Ada(), True), (Critical(SnapKV()), Budget(), True), (Peak(), Ada(), False), (Critical(Peak()), Budget(), False)],
)
def test_a_policy_is_stored_by_its_settings_where_its_code_is_the_librarys(model, folder, policy, budget, stored):
    programs = Programs(model, folder=folder, evicts=Selection(policy, budget))
    assert (programs.observe.store_of() is not None) == stored
    assert programs.run.store_of((np.int32(3), "text", None)) is not None
    assert programs.run.store_of((np.int32(3), (lambda logits: logits,))) is None  # a function among the static arguments


def test_the_files_used_last_stay(model, folder, expected, monkeypatch, tmp_path):
    kept = store.ProgramStore.of(tmp_path / "programs", model)
    kept.folder.mkdir(mode=0o700)
    for age, name in enumerate(("new", "old", "older")):
        (kept.folder / name).write_bytes(bytes(10))
        os.utime(kept.folder / name, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(store, "LIMIT", 20)
    kept._trim()
    assert {path.name for path in kept.folder.iterdir()} == {"new", "old"}


def test_layers_of_one_structure_are_lowered_once(model):
    programs = Programs(model)
    text = programs.run.lower(*programs.new(1, 2), AT, TABLE, np.int32(1)).as_text()
    calls = re.findall(r"call @(layer_of\w*)\(", text)
    assert len(calls) == LAYERS
    assert len(set(calls)) == 2  # one dense, one with experts
    assert len(re.findall(r"func.func private @layer_of", text)) == 2


def test_a_failed_compilation_is_tried_again(model):
    failing = [True]

    def logits(model, x):
        if failing.pop() if failing else False:
            raise RuntimeError("once")
        return x + 1

    program = Program(logits, Weights(model))
    with pytest.raises(RuntimeError, match="once"):
        program(np.ones(1, np.float32))
    assert program(np.ones(1, np.float32)) == 2


def test_waiting_for_programs_is_told_apart_from_running(model):
    programs = Programs(model)
    start = time.perf_counter()
    arrays = programs.new(1, 2)
    middle = time.perf_counter()
    running, compiling = between(programs.waits, start, middle)
    assert compiling > running >= 0
    jax.block_until_ready(programs.new(1, 2)), jax.block_until_ready(arrays)
    assert between(programs.waits, middle, time.perf_counter())[1] == 0


def test_only_the_part_of_a_wait_within_a_span_counts():
    waits = Waits()
    waits.spans += [(1.0, 3.0), (5.0, 6.0)]
    assert between(waits, 2.0, 5.5) == pytest.approx((2.0, 1.5))
    assert between(waits, 3.0, 5.0) == pytest.approx((2.0, 0.0))


def test_programs_of_a_request_are_compiled_in_threads(model, monkeypatch):
    threads = set()
    compile = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self, *a: threads.add(threading.current_thread()) or compile(self, *a)
    )
    generated(Programs(model))
    assert threads
    assert threading.main_thread() not in threads


def test_a_stored_program_with_kernels_finds_their_runtime(monkeypatch):
    imported = []
    monkeypatch.setattr(choice, "_hopper", lambda: True)
    monkeypatch.setattr(choice, "import_module", imported.append)
    load_runtime()
    monkeypatch.setattr(choice, "_hopper", lambda: False)
    load_runtime()
    assert imported == ["jax.experimental.mosaic.gpu"]
