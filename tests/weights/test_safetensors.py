"""Folders and files as read by us and by the safetensors library."""

import json
import os
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save, save_file

from mla_jax.base.errors import BadFile, MlaJaxError
from mla_jax.weights.safetensors import MAX_INDEXED, STORED_DTYPES, open_folder

FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64]
FP8 = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu]


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def read_all(folder: Path) -> dict[str, np.ndarray]:
    opened = open_folder(folder)
    found = {name: opened.read(name) for name in opened.tensors}
    opened.close()
    return found


@pytest.mark.parametrize("dtype", [*FLOATS, np.int64, np.int32, np.uint8, np.bool_], ids=lambda d: np.dtype(d).name)
def test_tensors_equal_those_of_the_safetensors_library(tmp_path, dtype):
    rng = np.random.default_rng(0)
    save_file({f"t{n}": rng.standard_normal((n, 5)).astype(dtype) for n in (1, 2, 7)}, tmp_path / "model.safetensors")
    theirs, ours = load_file(tmp_path / "model.safetensors"), read_all(tmp_path)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype
        np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.parametrize("dtype", FP8, ids=lambda d: np.dtype(d).name)
def test_fp8_tensors_come_back_bit_for_bit(tmp_path, dtype):
    every_value = np.arange(256, dtype=np.uint8).view(dtype).reshape(16, 16)
    save_file({"t": every_value}, tmp_path / "model.safetensors")
    found = read_all(tmp_path)["t"]
    assert found.dtype == dtype
    assert found.shape == (16, 16)
    assert bits(found) == bits(every_value)


def test_scalars_and_tensors_of_no_elements_are_read(tmp_path):
    save_file(
        {"scalar": np.array(3, np.float32), "none": np.zeros((0, 4), np.float32), "also": np.zeros((3, 0))},
        tmp_path / "m.safetensors",
    )
    found = read_all(tmp_path)
    assert {name: value.shape for name, value in found.items()} == {"scalar": (), "none": (0, 4), "also": (3, 0)}
    assert found["scalar"] == 3


def test_the_dtype_table_holds_the_sizes_that_the_library_has(tmp_path):
    for name, dtype in STORED_DTYPES.items():
        header = json.dumps({"t": {"dtype": name, "shape": [1], "data_offsets": [0, np.dtype(dtype).itemsize]}}).encode()
        file = tmp_path / f"{name}.safetensors"
        file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(np.dtype(dtype).itemsize))
        with safetensors.safe_open(file, "numpy") as f:
            assert f.get_slice("t").get_dtype() == name


def test_files_without_an_index_are_read_together(tmp_path):
    save_file({"a": np.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": np.ones(3)}, tmp_path / "model-00002-of-00002.safetensors")
    assert {name: len(value) for name, value in read_all(tmp_path).items()} == {"a": 2, "b": 3}


def test_a_file_is_never_mapped(tmp_path):
    save_file({"a": np.ones(100_000)}, tmp_path / "model.safetensors")
    opened = open_folder(tmp_path)
    opened.read("a")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    opened.close()


def test_what_is_no_folder_is_named(tmp_path):
    with pytest.raises(BadFile, match=r"nowhere is not a model folder\n.*config\.json"):
        open_folder(tmp_path / "nowhere")


@pytest.fixture
def hub(tmp_path):
    """A Hub cache: files of a snapshot are links into the blobs of its repository."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    weight_map = {}
    for i, name in enumerate(("a", "b"), 1):
        save_file({name: np.full(3, i, np.float32)}, blobs / f"{i:064x}")
        weight_map[name] = f"model-0000{i}-of-00002.safetensors"
        (snapshot / weight_map[name]).symlink_to(f"../../blobs/{i:064x}")
    (blobs / "index").write_text(json.dumps({"weight_map": weight_map}))
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/index")
    return snapshot


def test_the_links_of_a_hub_cache_are_followed(hub):
    assert {name: value.tolist() for name, value in read_all(hub).items()} == {"a": [1, 1, 1], "b": [2, 2, 2]}


def test_a_hub_cache_reached_through_a_link_is_read(hub, tmp_path):
    (tmp_path / "model").symlink_to(hub)
    assert read_all(tmp_path / "model").keys() == {"a", "b"}


def test_a_link_from_a_hub_cache_to_another_place_is_refused(hub, tmp_path):
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "elsewhere")
    (hub / "model-00001-of-00002.safetensors").unlink()
    (hub / "model-00001-of-00002.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadFile, match="leaves the model folder"):
        open_folder(hub)


def test_a_model_of_many_files_may_hold_more_tensors_than_one_file(tmp_path, monkeypatch):
    assert MAX_INDEXED > 2 * 60 * 384 * 3  # Kimi-K2: its layers' experts, each weight with its scale
    monkeypatch.setattr("mla_jax.weights.safetensors.MAX_TENSORS", 50)
    weight_map = {}
    for letter in "ab":
        file = f"{letter}.safetensors"
        save_file({f"{letter}{i}": np.zeros(1) for i in range(40)}, tmp_path / file)
        weight_map |= {f"{letter}{i}": file for i in range(40)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(open_folder(tmp_path).tensors) == 80


# ---- random damage: we refuse whatever the library refuses, and raise nothing but our own errors

VALID = save(
    {
        "model.norm.weight": np.arange(6, dtype=np.float32),
        "a": np.ones((2, 3), ml_dtypes.bfloat16),
        "w_scale_inv": np.ones((1, 1), np.float32),
        "none": np.zeros((0,), np.int64),
    },
    metadata={"format": "pt"},
)
HEADER = 8 + struct.unpack("<Q", VALID[:8])[0]


def judge(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        file.write_bytes(data)
        try:
            ours = read_all(Path(folder))
        except MlaJaxError:
            return
        with safetensors.safe_open(file, "numpy") as f:  # raises where the library refuses what we did not
            assert ours.keys() == set(f.keys())
        for name, value in ours.items():
            assert value.nbytes <= len(data), name


def test_the_file_to_be_damaged_is_valid():
    judge(VALID)
    with TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").write_bytes(VALID)
        assert len(read_all(Path(folder))) == 4


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, HEADER + 8), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_never_pass_where_the_library_refuses(changes):
    data = bytearray(VALID)
    for where, byte in changes:
        data[where] = byte
    judge(bytes(data))


@settings(max_examples=150)
@given(st.integers(0, len(VALID)), st.binary(max_size=12), st.integers(0, 12))
def test_cut_inserted_and_removed_bytes_never_pass_where_the_library_refuses(where, inserted, removed):
    judge(VALID[:where] + inserted + VALID[where + removed :])
    judge(VALID[:where])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-8, 64) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(
    st.sampled_from(["model.norm.weight", "a", "none", "__metadata__", "", "new"]),
    st.sampled_from(["dtype", "shape", "data_offsets", "more", None]),
    JSON,
)
def test_changed_entries_never_pass_where_the_library_refuses(name, key, value):
    entries = json.loads(VALID[8:HEADER])
    if key is None:
        entries[name] = value
    else:
        entries.setdefault(name, {})[key] = value
    header = json.dumps(entries).encode()
    judge(struct.pack("<Q", len(header)) + header + VALID[HEADER:])


def test_a_name_that_is_no_text_of_the_file_system_is_refused(tmp_path):
    save_file({"a": np.ones(2)}, tmp_path / "model.safetensors")
    os.rename(tmp_path / "model.safetensors", os.fsencode(tmp_path) + b"/m\xff.safetensors")
    with pytest.raises(BadFile, match="not a name of a file in the folder"):
        open_folder(tmp_path)
