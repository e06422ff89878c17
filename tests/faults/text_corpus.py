"""Every bad tokenizer, tokenizer_config.json, generation_config.json and chat template, and a tiktoken.model."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import models
import tokenizers
from faults import hf
from faults.change import Fault, both, folder_instead_of, pipe_instead_of, raw, remove, sparse
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import WordLevel

from mla_jax.base.errors import BadConfig, BadFile, BadTemplate
from mla_jax.engine.text import open_text
from mla_jax.weights.open import open_source

TOKENIZER, SETTINGS, GENERATION, TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
HUGE = "9" * 5000


def write_valid(root: Path) -> None:
    models.write(root / "single", hf.HF, models.tensors(hf.HF))
    model = tokenizers.Tokenizer(WordLevel({f"word{i}": i for i in range(90)}, unk_token="word0"))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<bos>"])
    model.save(str(root / "single" / TOKENIZER))
    (root / "single" / SETTINGS).write_text('{"bos_token": "<bos>", "add_bos_token": true}')
    (root / "single" / GENERATION).write_text('{"temperature": 0.5, "eos_token_id": 1}')
    (root / "single" / TEMPLATE).write_text("{{ messages[0].content }}")


def read(folder: Path) -> None:
    open_text(open_source(folder))


def content(file: str, text: str):
    return raw(lambda data: text.encode(), file)


def tokenizer(edit: Callable[[dict], object]):
    """Changes the parsed tokenizer.json."""

    def mutate(folder: Path):
        parsed = json.loads((folder / TOKENIZER).read_text())
        edit(parsed)
        (folder / TOKENIZER).write_text(json.dumps(parsed))

    return mutate


def ranks_of_a_chain(folder: Path):
    """A tiktoken.model with ever longer tokens of one letter."""
    tokens = [*(bytes([b]) for b in range(256)), *(b"a" * n for n in range(2, 1025))]
    (folder / "tiktoken.model").write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))


FAULTS = (
    *(
        fault
        for file, error in ((TOKENIZER, BadFile), (SETTINGS, BadFile), (GENERATION, BadConfig))
        for fault in (
            Fault(f"{file}_is_a_pipe", pipe_instead_of(file), error, (file, "regular file")),
            Fault(f"{file}_is_a_folder", folder_instead_of(file), error, (file, "regular file")),
            Fault(f"{file}_empty", content(file, ""), error, (file, "not valid JSON")),
            Fault(f"{file}_is_a_list", content(file, "[]"), error, (file, "not a JSON object")),
            Fault(f"{file}_of_1_gb", sparse(file, 1 << 30), error, (file, "too large")),
            Fault(f"{file}_with_a_huge_number", content(file, f'{{"a": {HUGE}}}'), error, (file, "number 999", "too large")),
            Fault(f"{file}_with_half_a_pair", content(file, r'{"a": "\ud800"}'), error, (file, "half of a surrogate pair")),
            Fault(f"{file}_key_twice", content(file, '{"a": 1, "a": 2}'), error, (file, "key given twice")),
        )
    ),
    Fault(
        "bos_token_half_a_pair",
        content(SETTINGS, r'{"bos_token": "\udc00", "add_bos_token": true}'),
        BadFile,
        (SETTINGS, r"\udc00, half of a surrogate pair"),
    ),
    Fault(
        "added_token_half_a_pair",
        content(SETTINGS, r'{"added_tokens_decoder": {"5": {"content": "\ud800"}}}'),
        BadFile,
        (SETTINGS, r"\ud800, half of a surrogate pair"),
    ),
    Fault("bos_token_unknown", content(SETTINGS, '{"bos_token": "<b>", "add_bos_token": true}'), BadFile, ("lacks", "<b>")),
    Fault(
        "tokenizer_of_no_model", tokenizer(lambda t: t.pop("model")), BadFile, (TOKENIZER, "refused by the tokenizers library")
    ),
    Fault(
        "ids_beyond_the_model",
        tokenizer(lambda t: t["model"]["vocab"].update(word89=96)),
        BadFile,
        (TOKENIZER, "found id 96", "vocab_size 96"),
    ),
    Fault(
        "added_token_of_another_id", tokenizer(lambda t: t["added_tokens"][0].update(id=95)), BadFile, ("<bos> has id 95", "90")
    ),
    Fault("end_token_is_a_text", content(GENERATION, '{"eos_token_id": "</s>"}'), BadConfig, ("eos_token_id", "</s>")),
    Fault("temperature_out_of_range", content(GENERATION, '{"temperature": 5000}'), BadConfig, (GENERATION, "is 5000")),
    Fault("template_not_utf8", raw(lambda data: b"\xff", TEMPLATE), BadTemplate, (TEMPLATE, "not UTF-8")),
    Fault("template_of_1_gb", sparse(TEMPLATE, 1 << 30), BadTemplate, (TEMPLATE, "too large")),
    Fault(
        "a_chain_of_tokens",
        both(remove(TOKENIZER), ranks_of_a_chain),
        BadFile,
        ("tiktoken.model", "too many tokens that are made of other tokens"),
    ),
)
