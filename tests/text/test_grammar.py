"""Grammars: masks against a search through the vocabulary, answers drawn from masks against jsonschema and re."""

import json
import re

import jsonschema
import numpy as np
import pytest

from mla_jax.base.errors import BadRequest
from mla_jax.base.grammar import MAX_CHOICES, MAX_GRAMMAR, Grammar
from mla_jax.base.options import SamplingParams
from mla_jax.text import grammar as grammar_module
from mla_jax.text.grammar import Grammars, Masked, Matcher
from mla_jax.text.tokenizer import Tokenizer
from mla_jax.weights.hub import DEMO

SIZE = 4_100  # four ids that the demo's tokenizer lacks, and no multiple of a word
CHOICES = ["yes", "yesterday", "no", "ж", 'a "quoted" word\n']
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "likes": {"type": "array", "items": {"enum": ["tea", "jam", None, 3]}, "maxItems": 3},
        "friend": {"$ref": "#/$defs/friend"},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
    "$defs": {"friend": {"type": "object", "properties": {"age": {"type": "number"}}, "required": ["age"]}},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(DEMO, 4_096, 0)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def vocabulary(tokenizer) -> Grammars:
    return Grammars(tokenizer, SIZE, [tokenizer.eos_id])


def masks_of(vocabulary: Grammars, matcher: Matcher, draft=(), places: int | None = None) -> np.ndarray:
    masks = np.zeros((1, places or len(draft) + 1, vocabulary.words), np.uint32)
    vocabulary.fill([Masked(0, matcher, draft)], masks)
    return masks[0]


def allowed(mask: np.ndarray) -> set[int]:
    """The tokens of a mask."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def drawn(vocabulary: Grammars, tokenizer: Tokenizer, grammar: Grammar, seed: int, most: int = 400) -> str:
    """An answer of tokens that are drawn from those allowed, more often of those that end something."""
    rng, matcher, answer = np.random.default_rng(seed), vocabulary.matcher(grammar), []
    ending = {token for text in '"]}0123456789' for token in tokenizer.encode(text, bos=False)}
    while len(answer) < most:
        tokens = sorted(allowed(masks_of(vocabulary, matcher)[0]))
        if tokenizer.eos_id in tokens and (matcher.complete or rng.random() < 0.5):
            return tokenizer.decode(answer)
        tokens = [token for token in tokens if token != tokenizer.eos_id]
        closing = [token for token in tokens if token in ending]
        token = int(rng.choice(closing if closing and rng.random() < 0.7 else tokens))
        matcher.follow([token])
        answer.append(token)
    raise AssertionError(f"no end after {most} tokens: {tokenizer.decode(answer)[:200]}")


@pytest.mark.parametrize("begun", ["", "y", "yes", "n", "ж", 'a "q'])
def test_a_mask_allows_the_tokens_that_a_search_through_the_vocabulary_finds(vocabulary, tokenizer, begun):
    # Where several bytes are certain, llguidance allows only the token that the tokenizer would write
    matcher = vocabulary.matcher(Grammar.choice(CHOICES))
    matcher.follow(tokenizer.encode(begun, bos=False))
    rests = [text.encode()[len(begun.encode()) :] for text in CHOICES if text.startswith(begun)]
    text_ids = set(range(4_096)) - set(tokenizer.control.values())
    expected = {i for i in text_ids if any(rest.startswith(tokenizer.piece(i) or b"\0") for rest in rests)}
    if begun in CHOICES:
        expected.add(tokenizer.eos_id)
    assert allowed(masks_of(vocabulary, matcher)[0]) == expected


def test_masks_of_a_draft_are_those_of_its_tokens_one_by_one(vocabulary, tokenizer):
    matcher, steps = vocabulary.matcher(Grammar.json_schema(PERSON)), vocabulary.matcher(Grammar.json_schema(PERSON))
    draft = tokenizer.encode('{"name": "Ada", "age"', bos=False)
    masks = masks_of(vocabulary, matcher, draft)
    for token, mask in zip(draft, masks[:-1], strict=True):
        np.testing.assert_array_equal(mask, masks_of(vocabulary, steps)[0])
        steps.follow([token])
    np.testing.assert_array_equal(masks[-1], masks_of(vocabulary, steps)[0])
    np.testing.assert_array_equal(masks[0], masks_of(vocabulary, matcher)[0])  # the draft was not followed


def test_behind_a_forbidden_token_of_a_draft_all_is_allowed(vocabulary, tokenizer):
    matcher = vocabulary.matcher(Grammar.choice(["yes"]))
    draft = [*tokenizer.encode("y", bos=False), *tokenizer.encode("n", bos=False), tokenizer.eos_id]
    assert matcher.taken(draft) == 1
    masks = masks_of(vocabulary, matcher, draft, places=5)
    assert draft[1] not in allowed(masks[1])
    assert (masks[2:4] == 0xFFFFFFFF).all()
    assert not masks[4].any(), "a place behind the draft was written"


def test_rows_of_others_are_not_touched(vocabulary):
    masks = np.full((4, 2, vocabulary.words), 7, np.uint32)
    vocabulary.fill([Masked(2, vocabulary.matcher(Grammar.json_object()))], masks)
    assert (masks[[0, 1, 3]] == 7).all()
    assert (masks[2, 1] == 7).all()
    assert not (masks[2, 0] == 7).all()
    vocabulary.fill([], masks)


def test_masks_of_another_size_are_refused(vocabulary):
    row = Masked(1, vocabulary.matcher(Grammar.json_object()), [5, 6])
    for shape in [(2, 3, vocabulary.words - 1), (2, 2, vocabulary.words), (1, 3, vocabulary.words)]:
        with pytest.raises(ValueError, match="do not hold"):
            vocabulary.fill([row], np.zeros(shape, np.uint32))


def test_nothing_but_an_end_comes_when_the_grammar_is_complete(vocabulary, tokenizer):
    matcher = vocabulary.matcher(Grammar.regex("[0-9]{2}"))
    assert not matcher.complete
    for text in "42":
        matcher.follow(tokenizer.encode(text, bos=False))
    assert matcher.complete
    assert allowed(masks_of(vocabulary, matcher)[0]) == {tokenizer.eos_id}


@pytest.mark.parametrize("seed", range(8))
def test_json_drawn_from_masks_validates(vocabulary, tokenizer, seed):
    answer = json.loads(drawn(vocabulary, tokenizer, Grammar.json_schema(PERSON), seed))
    jsonschema.validate(answer, PERSON)
    assert isinstance(json.loads(drawn(vocabulary, tokenizer, Grammar.json_object(), seed)), dict)


@pytest.mark.parametrize("pattern", [r"[a-f]{3}-\d{2,4}", r"(ж|é)+!", r"\w{1,8}@\w{1,8}\.(com|org)"])
def test_texts_drawn_from_masks_match_a_pattern(vocabulary, tokenizer, pattern):
    for seed in range(4):
        assert re.fullmatch(pattern, drawn(vocabulary, tokenizer, Grammar.regex(pattern), seed))


def test_texts_drawn_from_masks_follow_rules(vocabulary, tokenizer):
    rules = 'start: sum\nsum: NUMBER | "(" sum "+" sum ")"\nNUMBER: /[1-9][0-9]?/'
    for seed in range(4):
        text = drawn(vocabulary, tokenizer, Grammar.lark(rules), seed)
        assert eval(text, {"__builtins__": {}}) > 0
        assert re.fullmatch(r"[0-9()+]+", text)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar.json_schema({"type": "strin"}), r"the JSON schema cannot be compiled\n.*Invalid type: strin"),
        (lambda: Grammar.json_schema({"not": {}}), "Unimplemented keys"),
        (lambda: Grammar.json_schema({"$ref": "#/nothing"}), "does not exist"),
        (lambda: Grammar.json_schema("{"), "a JSON schema is not JSON"),
        (lambda: Grammar.json_schema("[1]"), "a JSON schema is an object"),
        (lambda: Grammar.json_schema({"enum": {1, 2}}), "cannot be written as JSON"),
        (lambda: Grammar.regex("(a"), "the regular expression cannot be compiled\n.*unclosed group"),
        (lambda: Grammar.regex("(?=a)b"), "look-around"),
        (lambda: Grammar.lark("begin: /a/"), "the Lark grammar cannot be compiled\n.*start"),
        (lambda: Grammar.regex("a" * (MAX_GRAMMAR + 1)), "has 262,145 characters\n.*262,144"),
        (lambda: Grammar.choice([]), "a list of texts"),
        (lambda: Grammar.choice(["a"] * (MAX_CHOICES + 1)), "1,001 choices\n.*1,000"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_with_the_reason(vocabulary, make, says):
    with pytest.raises(BadRequest, match=says):
        vocabulary.matcher(make())


def test_a_token_that_the_mask_forbids_is_refused(vocabulary, tokenizer):
    matcher = vocabulary.matcher(Grammar.choice(["yes"]))
    with pytest.raises(BadRequest, match="cannot be followed"):
        matcher.follow(tokenizer.encode("n", bos=False))


def test_a_tokenizer_without_bytes_or_ends_is_refused(tokenizer, monkeypatch):
    any_object = Grammar.json_object()
    with pytest.raises(BadRequest, match="need a tokenizer"):
        Grammars(None, SIZE, [1]).matcher(any_object)
    with pytest.raises(BadRequest, match="need an end token"):
        Grammars(tokenizer, SIZE, []).matcher(any_object)
    monkeypatch.setattr(tokenizer, "byte_level", False)
    with pytest.raises(BadRequest, match="byte-level"):
        Grammars(tokenizer, SIZE, [1]).matcher(any_object)


def test_a_missing_package_is_named(tokenizer, monkeypatch):
    def none(name):
        raise ImportError(name)

    monkeypatch.setattr(grammar_module.importlib, "import_module", none)
    with pytest.raises(BadRequest, match='the extra "grammar"'):
        Grammars(tokenizer, SIZE, [1]).matcher(Grammar.json_object())


def test_forced_tokens_are_those_without_a_choice(vocabulary, tokenizer):
    matcher = vocabulary.matcher(Grammar.choice(["yes"]))
    forced = matcher.forced()
    assert tokenizer.decode(forced) == "yes"
    matcher.follow(forced)
    assert matcher.complete
    matcher.follow([tokenizer.eos_id])  # nothing is behind the end


def test_answers_to_one_grammar_do_not_share_their_place(vocabulary, tokenizer):
    first, second = (vocabulary.matcher(Grammar.choice(["yes"])) for _ in range(2))
    first.follow(first.forced())
    assert first.complete
    assert not second.complete


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"json_schema": '{"type": "object"}'}, "json_schema"),
        ({"json_object": True}, "json_schema"),
        ({"regex": "[0-9]+"}, "regex"),
        ({"lark": 'start: "a"'}, "lark"),
        ({"choice": ["a", "b"]}, "lark"),
        (Grammar.regex("a"), "regex"),
    ],
)
def test_a_grammar_can_be_named_by_an_object(given, kind):
    assert SamplingParams(grammar=given).grammar.kind == kind


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, "a grammar is 3"),
        ({}, "one of the keys json_schema"),
        ({"regex": "a", "lark": "b"}, "one of the keys"),
        ({"rege": "a"}, "did you mean regex"),
        ({"regex": 3}, "regex is 3\\W+expected text"),
        ({"json_object": False}, "expected true"),
        ({"choice": {"a": "b"}}, "a list of texts"),
        ({"json_schema": 7}, "expected a JSON schema"),
    ],
)
def test_an_object_that_names_no_grammar_is_refused(given, says):
    with pytest.raises(BadRequest, match=says):
        SamplingParams(grammar=given)
