"""A GGUF file changed at random is read, its tensors within it and apart, or refused; no other error comes out."""

import os
from contextlib import suppress
from itertools import pairwise

import pytest
from faults import gguf_corpus
from faults.cost import LONG, cost_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.base.errors import MlaJaxError
from mla_jax.weights.gguf_header import read_gguf_header

VALID = gguf_corpus.valid().file()


@pytest.mark.deep
@given(data=st.data())
@settings(max_examples=600)
def test_a_file_with_random_bytes_changed_is_read_or_refused(tmp_path_factory, data):
    """Half of the changes hit the header, where small numbers do most."""
    found = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 330) | st.integers(0, len(found) - 1))
        found[at] = data.draw(st.sampled_from([0, 1, 7, 8, 9, 127, 128, 255]) | st.integers(0, 255))
    _read_or_refuse(tmp_path_factory, bytes(found))


@pytest.mark.deep
@given(data=st.data())
@settings(max_examples=300)
def test_a_file_with_a_piece_cut_out_or_doubled_is_read_or_refused(tmp_path_factory, data):
    start, end = sorted(data.draw(st.lists(st.integers(0, len(VALID)), min_size=2, max_size=2)))
    again = data.draw(st.integers(0, 2))
    _read_or_refuse(tmp_path_factory, VALID[:start] + VALID[start:end] * again + VALID[end:])


@given(head=st.sampled_from([24, 60, 120, 200]), data=st.binary(max_size=400))
@settings(max_examples=300)
def test_a_file_of_random_bytes_behind_a_sound_start_is_read_or_refused(tmp_path_factory, head, data):
    _read_or_refuse(tmp_path_factory, VALID[:head] + data)


def _read_or_refuse(tmp_path_factory, content: bytes):
    """Tensors that are read must be within the file, and disjoint."""
    file = tmp_path_factory.getbasetemp() / f"mutated-{os.getpid()}.gguf"
    file.write_bytes(content)
    headers = []

    def read():
        headers.clear()
        with suppress(MlaJaxError):
            headers.append(read_gguf_header(file))

    assert cost_of(read).seconds < LONG
    if not headers:
        return
    (header,) = headers
    spans = sorted((t.offset, t.offset + t.nbytes) for t in header.tensors)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(end <= len(content) for _, end in spans)
