"""Continuations that count as parsed, and the windows that cover a file."""

import pytest
import quality

HEAD = "def f(x):"
WELL = {
    "a body": "\n    return x\n",
    "a body cut inside its second statement": "\n    y = x + 1\n    return (y,\n",
    "a body cut inside a string": '\n    y = 1\n    z = """no end\n',
    "a last header without a body": "\n    y = 1\n    if y:\n",
    "a last line that is not whole": "\n    y = 1\n    retur",
    "an expression over several lines": "\n    return g(\n        x,\n    )\n",
    "another function after it": "\n    return x\n\ndef g(y):\n    pass\n",
}
BADLY = {
    "nothing": "",
    "a docstring without an end": '\n    """Says and says\n    and says\n',
    "a statement that is none": "\n    return return\n    y = 1\n",
    "an indentation that fits no block": "\n        y = 1\n    z = 2\n",
    "no body": "\nx = 1\n",
    "only a header": "\n    for y in x:\n",
}


@pytest.mark.parametrize("name", WELL)
def test_what_parses_up_to_its_last_whole_statement_counts(name):
    assert quality.continues_well(HEAD, WELL[name])


@pytest.mark.parametrize("name", BADLY)
def test_what_does_not_parse_or_has_no_statement_does_not_count(name):
    assert not quality.continues_well(HEAD, BADLY[name])


@pytest.mark.parametrize("length", [2, 500, 8192, 8193, 12288, 12289, 30000])
def test_windows_score_every_token_but_bos_once_and_with_enough_before_it(length):
    ids, scored = list(range(length)), []
    for tokens, new in quality.windows(ids):
        assert len(tokens) <= quality.WINDOW
        assert tokens[0] == 0 or len(tokens) - new >= quality.STRIDE
        scored += tokens[-new:]
    assert scored == ids[1:]
