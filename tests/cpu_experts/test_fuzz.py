"""For any arguments the library returns a status: it neither crashes nor writes results of a refused call."""

import ctypes

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_layers import random_batch, random_layer

from cpu_experts import Experts
from cpu_experts.library import ForwardCall, Weights

GOOD = random_batch(3, 32, 4, 2)
LEAST, MOST = -(2**31), 2**31 - 1
OK, INVALID, UNSUPPORTED, CLOSED = 0, 1, 2, 4
steady = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])

WEIGHTS = {
    "struct_bytes": [0, 8, ctypes.sizeof(Weights) + 8, LEAST, MOST],
    "gate_up_precision": [-1, 1, 2, 3, 4, 5, 6, 7, 8, LEAST, MOST],
    "down_precision": [-1, 1, 2, 3, 4, 5, 6, 7, 8, LEAST, MOST],
    "experts": [0, -1, 1, 5, 2**16, 2**16 + 1, LEAST, MOST],
    "model": [0, -1, 1, 31, 256, 2**16, 2**16 + 1, LEAST, MOST],
    "width": [0, -1, 1, 17, 256, 2**16, 2**16 + 1, LEAST, MOST],
    "gate_up": [None, "moved"],
    "down": [None, "moved"],
    "gate_up_bytes": [0, 1, 64, 2**63, 2**64 - 1],
    "down_bytes": [0, 1, 64, 2**63, 2**64 - 1],
    "threads": [0, -1, 1, 3, 1025, LEAST, MOST],
    "isa": [-1, 1, 2, 3, 4, 5, LEAST, MOST],
    "max_rows": [0, -1, 1, 2**20 + 1, LEAST, MOST],
}
BATCH = {
    "struct_bytes": [0, 8, ctypes.sizeof(ForwardCall) + 8, LEAST, MOST],
    "tokens": [0, -1, 1, 2, LEAST],
    "chosen": [0, -1, 1, 64, 65, LEAST, MOST],
    "x_dtype": [1, 2, -1, MOST],
    "out_dtype": [1, 2, -1, LEAST],
    "x": [None, "moved"],
    "topk_ids": [None, "moved"],
    "topk_weights": [None, "moved"],
    "out": [None, "moved"],
}


def changes(table: dict) -> st.SearchStrategy:
    """A few fields with other values."""
    one = st.sampled_from([(field, value) for field, values in table.items() for value in values])
    return st.lists(one, max_size=3).map(dict)


def changed(struct: ctypes.Structure, fields: dict) -> ctypes.Structure:
    for field, value in fields.items():
        setattr(struct, field, getattr(struct, field) + 2 if value == "moved" else value)
    return struct


@steady
@given(fields=changes(WEIGHTS), nowhere=st.booleans())
def test_opening_anything_gives_a_status(built, native, fields, nowhere):
    with Experts(*random_layer(4, 32, 16), threads=1) as layer:
        packed = [p.ctypes.data for p in layer._packed] + [p.nbytes for p in layer._packed]
        weights = changed(Weights(ctypes.sizeof(Weights), 0, 0, 4, 32, 16, *packed, 1, 0, 64), fields)
        handle = ctypes.c_uint64(77)
        status = native.cpu_experts_open(weights, None if nowhere else handle)
        assert status in ({INVALID} if nowhere else {OK, INVALID, UNSUPPORTED})
        if status:
            assert handle.value == 77
            assert native.cpu_experts_last_error()
        else:
            assert native.cpu_experts_close(handle.value) == OK


@steady
@given(
    fields=changes(BATCH),
    number=st.sampled_from([(-1, 1.0), (4, 1.0), (5, 1.0), (LEAST, 1.0), (MOST, 1.0), (0, np.nan), (0, -np.inf), (0, 3e38)]),
    at=st.tuples(st.integers(0, 2), st.integers(0, 1)),
    handle=st.sampled_from([None, None, None, 0, 99999, 2**64 - 1]),
)
def test_a_forward_of_anything_gives_a_status(built, native, fields, number, at, handle):
    """Arrays are as long as the most that any accepted sizes need: only their lengths the library cannot know."""
    x, ids, weights = np.zeros(3 * 32 + 1, np.float32), np.zeros(3 * 64 + 1, np.int32), np.ones(3 * 64 + 1, np.float32)
    ids[:6], weights[:6] = GOOD.ids.ravel(), GOOD.weights.ravel()
    ids[at[0] * 2 + at[1]], weights[at[0] * 2 + at[1]] = number
    out = np.full(3 * 32 + 1, 7, np.float32)
    with Experts(*random_layer(4, 32, 16), threads=1) as layer:
        pointers = (a.ctypes.data for a in (x, ids, weights, out))
        batch = changed(ForwardCall(ctypes.sizeof(ForwardCall), 3, 2, 0, 0, *pointers), fields)
        given_handle = layer._handle if handle is None else handle
        first = native.cpu_experts_check(given_handle, batch)
        assert (out == 7).all()
        status = native.cpu_experts_forward(given_handle, batch)
    assert status == first
    assert status in ({OK, INVALID} if handle is None else {CLOSED})
    if status:
        assert (out == 7).all()
        assert native.cpu_experts_last_error()


@steady
@given(st.lists(st.tuples(st.sampled_from(["open", "forward", "close"]), st.integers(0, 3)), max_size=12))
def test_handles_in_any_order(built, native, calls):
    """Against a set of those open: a closed one stays closed, whatever is opened after it."""
    layers, handles, closed = [], [], set()
    for call, i in calls:
        if call == "open":
            layers.append(Experts(*random_layer(2, 32, 16), threads=1 + i % 2))
            handles.append(layers[-1]._handle)
        elif i in closed:
            assert native.cpu_experts_close(handles[i]) == CLOSED
            assert native.cpu_experts_forward(handles[i], None) == CLOSED
        elif i < len(layers) and call == "forward":
            assert layers[i].forward(GOOD.x, GOOD.ids % 3, GOOD.weights).shape == (3, 32)
        elif i < len(layers):
            layers[i].close()
            closed.add(i)
    assert len(set(handles)) == len(handles)
