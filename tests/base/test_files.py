"""Small JSON files from untrusted folders."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.base.errors import BadConfig, BadFile, MlaJaxError, printable, shortened
from mla_jax.base.files import parse_json, read_json, sampled


def test_an_object_is_read_as_json_reads_it(tmp_path):
    content = {"a": [1, 2.5, None, True, {"b": "é\u2028😀"}], "": -7, "n": 10**60}
    (tmp_path / "x.json").write_text(json.dumps(content))
    assert read_json(tmp_path / "x.json", 1000) == content


@pytest.mark.parametrize(("text", "value"), [(r'{"a": "\ud83d\ude00"}', "😀"), (r'{"a": "\\ud800"}', r"\ud800")])
def test_whole_surrogate_pairs_and_escaped_backslashes_are_read(text, value):
    assert parse_json(text.encode(), "x") == {"a": value}


def test_a_file_of_exactly_the_limit_is_read_and_one_byte_more_is_not(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"a": 1}')
    assert read_json(file, 8) == {"a": 1}
    with pytest.raises(BadFile, match=r"x\.json is too large\n.*more than 7 bytes"):
        read_json(file, 7)


def test_a_limit_holds_for_files_that_never_end():
    with pytest.raises(BadFile, match="not a regular file"):
        read_json(Path("/dev/zero"), 100)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "found list at the top level"),
        ("7", "found int at the top level"),
        ("null", "found NoneType at the top level"),
        ('{"a": 1, "a": 1}', "key given twice: a"),
        ('{"x": {"a": 1, "b": 2, "a": 3, "b": 4}}', "key given twice: a, b"),
        ('{"\\n": 1, "\\n": 1}', "key given twice: \\\\n"),
        ('{"a": NaN}', "holds NaN"),
        ('{"a": [Infinity]}', "holds Infinity"),
        ('{"a": -Infinity}', "holds -Infinity"),
        ('{"a": 1e999}', "number 1e999 is too large"),
        ('{"a": -1e999}', "number -1e999 is too large"),
        ('{"a": ' + "1" * 101 + "}", "number 1111111111111111111111111111111111111111... is too large"),
        ('{"a": ' + "[" * 100_000 + "}", "nested too deeply"),
        ('{"a": "\\', "Invalid|Unterminated"),
        ('{"a": ["x\\ud800"]}', r"it holds \\ud800, half of a surrogate pair"),
        ('{"\\uDC00": 1}', r"it holds \\udc00, half of a surrogate pair"),
        ('{"a": "\\ude00\\ud83d"}', "half of a surrogate pair"),
    ],
)
def test_what_is_no_plain_object_is_refused_with_its_reason(text, words):
    with pytest.raises(BadFile, match=words):
        parse_json(text.encode(), "x")


def test_the_error_is_of_the_type_that_was_asked_for(tmp_path):
    for error in (BadConfig, BadFile):
        with pytest.raises(error, match="No such file"):
            read_json(tmp_path / "none.json", 100, error)


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:0123456789.eE-+truefalsn\\u', max_size=60).map(str.encode))
def test_random_bytes_give_an_object_or_our_own_error(data):
    try:
        found = parse_json(data, "x")
    except MlaJaxError as e:
        found = {"error": e}
    assert isinstance(found, dict)
    assert "error" not in found or str(found["error"]).startswith("x is not ")


@given(st.text())
def test_printable_text_is_one_short_line_without_control_characters(text):
    shown = printable(text)
    assert shown.isprintable()
    assert shown.isascii()
    assert 0 < len(shown) <= 80


def test_long_lists_are_cut_and_counted():
    assert shortened(["a", "b"], 2) == ["a", "b"]
    assert shortened(["a", "b", "c", "d"], 2) == ["a", "b", "and 2 more"]


def test_large_files_are_told_apart_by_their_sizes_and_by_pieces_from_all_over_them(tmp_path):
    content = bytes(3_000_000)
    others = [content[:-1], b"", b"a", *(content[:at] + bytes([1] * 9999) + content[at + 9999 :] for at in (0, 10**6, 2_990_001))]
    digests = []
    for number, found in enumerate([content, *others]):
        path = tmp_path / str(number)
        path.write_bytes(found)
        digests.append(sampled([path]))
    assert len(set(digests)) == len(digests)
    assert sampled([tmp_path / "0", tmp_path / "2"]) not in digests
