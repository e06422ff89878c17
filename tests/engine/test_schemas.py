"""Answers in JSON of random schemas, by a model that knows no JSON: each parses, and jsonschema finds it valid.

SCHEMAS=1000 is as many schemas; that takes half an hour on two cores."""

import json
import os
from typing import Any

import jsonschema
import numpy as np
import pytest

from mla_jax import LLM, BadRequest, Grammar, SamplingParams

COUNT, DEPTH = int(os.environ.get("SCHEMAS", "30")), 3
WORDS = ["name", "age", "tags", "of", "größe", "a b", 'q"', "x-1", "été", "items"]
PROMPTS = ["def read(path):\n", "import json\n\ndata = ", "class A:\n", "# numbers\n"]


def string(rng: np.random.Generator) -> dict[str, Any]:
    low = int(rng.integers(0, 4))
    return {"type": "string", "minLength": low, "maxLength": low + int(rng.integers(0, 9))}


def integer(rng: np.random.Generator) -> dict[str, Any]:
    low = int(rng.integers(-200, 200))
    return {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(0, 300))}


def number(rng: np.random.Generator) -> dict[str, Any]:
    low = int(rng.integers(-50, 50))
    return {"type": "number", "minimum": low, "maximum": low + 10, "multipleOf": 0.25}


def pattern(rng: np.random.Generator) -> dict[str, Any]:
    return {"type": "string", "pattern": str(rng.choice(["^[a-c]{2,5}$", "^[0-9]{4}-[0-9]{2}$", "^(on|off)$"]))}


def enumeration(rng: np.random.Generator) -> dict[str, Any]:
    values = [None, True, 3, -1.5, *WORDS]
    return {"enum": [values[i] for i in rng.choice(len(values), int(rng.integers(1, 5)), replace=False)]}


def simple(rng: np.random.Generator) -> dict[str, Any]:
    return {"type": str(rng.choice(["boolean", "null"]))}


def reference(rng: np.random.Generator) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{rng.choice(['point', 'level'])}"}


def array(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    low = int(rng.integers(0, 3))
    return {"type": "array", "items": schema(rng, depth - 1), "minItems": low, "maxItems": low + int(rng.integers(0, 3))}


def an_object(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    names = [str(name) for name in rng.choice(WORDS, int(rng.integers(1, 5)), replace=False)]
    required = [name for name in names if rng.random() < 0.6]
    properties = {name: schema(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def either(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema(rng, depth - 1) for _ in range(2)]}


LEAVES = [string, integer, number, pattern, enumeration, simple, reference]
NESTING = [array, an_object, an_object, either]


def schema(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    if depth == 0 or rng.random() < 0.3:
        return LEAVES[rng.integers(len(LEAVES))](rng)
    return NESTING[rng.integers(len(NESTING))](rng, depth)


def whole_schema(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    point = {"type": "object", "properties": {"x": integer(rng), "y": integer(rng)}, "required": ["x"]}
    defined = {"point": point | {"additionalProperties": False}, "level": {"enum": ["low", "high"]}}
    return an_object(rng, DEPTH) | {"$defs": defined}


def params_of(seed: int) -> SamplingParams:
    sampled = {"temperature": 1.0, "top_p": 0.95} if seed % 2 else {"temperature": 0.0}
    return SamplingParams(grammar=Grammar.json_schema(whole_schema(seed)), max_tokens=3000, seed=seed, **sampled)


@pytest.mark.deep
@pytest.mark.once
@pytest.mark.parametrize("draft", ["off", "mtp"])
def test_answers_to_many_schemas_are_valid(draft):
    with LLM(draft=draft, context=4096) as llm:
        outputs = llm.generate([PROMPTS[seed % 4] for seed in range(COUNT)], [params_of(seed) for seed in range(COUNT)])
    for seed, output in enumerate(outputs):
        assert output.finish_reason == "end", (seed, output.text)
        jsonschema.validate(json.loads(output.text), whole_schema(seed), jsonschema.Draft202012Validator)
    assert len({output.text for output in outputs}) > COUNT / 2


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.deep
@pytest.mark.once
def test_a_grammar_works_with_every_way_of_asking():
    params = SamplingParams(grammar={"json_schema": PERSON}, max_tokens=80, temperature=1.0, seed=7, n=2, logprobs=1)
    alone = SamplingParams(grammar={"json_schema": PERSON}, max_tokens=80, temperature=1.0, seed=7)
    with LLM(context=256) as llm:
        outputs = llm.generate("data = ", params)
        text = "".join(chunk.text for chunk in llm.stream("data = ", alone))
        with pytest.raises(BadRequest, match=r"cannot be compiled\n.*Invalid type: strin"):
            llm.generate("data = ", SamplingParams(grammar=Grammar.json_schema({"type": "strin"})))
    assert text == outputs[0].text
    assert text != outputs[1].text
    for output in outputs:
        jsonschema.validate(json.loads(output.text), PERSON)
        assert len(output.logprobs) == len(output.token_ids)
        # They are those of the model itself: a likelier token may be one that the grammar forbids
        assert any(max(place, key=place.get) != token for place, token in zip(output.logprobs, output.token_ids, strict=True))
