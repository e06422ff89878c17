"""How a model reads and writes text: tokenizer, chat template, sampling defaults and end tokens, from any kind of checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mla_jax.base.errors import BadConfig, BadRequest, shown
from mla_jax.base.files import allowed, read_json
from mla_jax.base.options import SamplingParams
from mla_jax.text import gguf_tokenizer
from mla_jax.text.chat import ChatTemplate
from mla_jax.text.deepseek_v32 import DeepSeekV32Rules
from mla_jax.text.guard import Guard
from mla_jax.text.tokenizer import Tokenizer
from mla_jax.weights.source import Source


class Text(NamedTuple):
    """`tokenizer` and `chat_template` are None where the checkpoint has none; `defaults` are of sampling."""

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | DeepSeekV32Rules | None
    defaults: dict[str, Any]
    end_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


def open_text(source: Source) -> Text:
    """Reads the files in the weights' folder, or the metadata of a GGUF file; runs nothing of a template."""
    with allowed(source.path):
        return _from_gguf(source) if source.metadata is not None else _from_folder(source)


FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
KIMI_FILES = ("tiktoken.model", "tokenizer.model")


def files_of(source: Source) -> dict[str, bytes]:
    """The same as files of a model folder, by name; written anew for a GGUF file."""
    if source.metadata is None:
        return {
            name: path.read_bytes()
            for name in (*FILES, *KIMI_FILES)
            if (path := source.path / name).is_file()
        }
    found = gguf_tokenizer.from_metadata(source.metadata, source.path.name, source.config.vocab_size)
    if found is None:
        return {}
    names = {
        key: i if i is None else found.tokenizer.model.id_to_token(i) for key, i in _special(found).items()
    }
    settings = {
        **names,
        "add_bos_token": found.tokenizer.bos_id is not None,
        "chat_template": found.chat_template,
    }
    contents = {
        "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": list(found.eos_ids)},
    }
    made = {
        name: (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
        for name, content in contents.items()
    }
    return {"tokenizer.json": found.tokenizer.model.to_str().encode(), **made}


def _special(found: gguf_tokenizer.GgufTokenizer) -> dict[str, int | None]:
    return {"bos_token": found.bos_id, "eos_token": next(iter(found.eos_ids), None)}


def _from_gguf(source: Source) -> Text:
    assert source.metadata is not None
    defaults = _gguf_defaults(source.metadata)
    found = gguf_tokenizer.from_metadata(source.metadata, source.path.name, source.config.vocab_size)
    if found is None:
        return Text(None, None, defaults, ())
    words = {
        name: str(found.tokenizer.model.id_to_token(i))
        for name, i in _special(found).items()
        if i is not None
    }
    template = found.chat_template and ChatTemplate.of(found.chat_template, source.path.name, words)
    return Text(
        found.tokenizer, template or None, defaults, found.eos_ids, found.notes + _without_end(found.eos_ids)
    )


# sampling default -> its key in a GGUF file
GGUF_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
}


def _gguf_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling as the file recommends it, else greedy."""
    given = {name: metadata[key] for name, key in GGUF_SAMPLING.items() if key in metadata}
    return _checked({"temperature": 0.0, "top_k": 0, "top_p": 1.0} | given, "the file's general.sampling")


def _checked(defaults: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        SamplingParams(**defaults)
    except BadRequest as e:
        raise BadConfig(f"{where} has sampling defaults out of range", *e.args[1:]) from e
    return defaults


def _from_folder(source: Source) -> Text:
    config, folder = source.config, source.path
    tokenizer = Tokenizer.from_folder(folder, config.vocab_size, config.bos_token_id)
    notes = (UNKNOWN_FORM,) if tokenizer is not None and isinstance(tokenizer.codec, Guard) else ()
    template = ChatTemplate.from_folder(folder)
    if template is None and config.model_type == "deepseek_v32":
        template = DeepSeekV32Rules()
    defaults, ends = _generation_defaults(folder, config.eos_token_id)
    if tokenizer is not None and tokenizer.eos_id is not None:
        ends = tuple(dict.fromkeys((*ends, tokenizer.eos_id)))
    return Text(tokenizer, template, defaults, ends, notes + _without_end(ends))


def _without_end(ends: tuple[int, ...]) -> tuple[str, ...]:
    return () if ends else (NO_END,)


NO_END = "no end token is named: answers end at max_tokens or at a stop text; --stop and stop_token_ids give others"
UNKNOWN_FORM = "tokenizer.json has a form that is not known; it works in a process of its own, with limits of time and memory"


def _generation_defaults(folder: Path, end_ids: tuple[int, ...]) -> tuple[dict, tuple[int, ...]]:
    """Sampling defaults and every end token: generation_config.json, where the folder has one, over config.json."""
    path = folder / "generation_config.json"
    given = read_json(path, 1 << 20, BadConfig) if path.exists() else {}
    ends = given.get("eos_token_id")
    ends = end_ids if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
    if not all(type(e) is int and -1 <= e < 2**31 for e in ends):
        raise BadConfig(
            "the folder names an eos_token_id that is no token id", f"found {shown(ends)} in {folder}"
        )
    sampled = given.get("do_sample") is True  # transformers leaves out a temperature of 1, its default
    defaults = {"temperature": 1.0 if sampled else 0.0, "top_k": 0, "top_p": 1.0}
    if given.get("do_sample", True):
        defaults |= {name: given[name] for name in defaults if given.get(name) is not None}
    return _checked(defaults, path.name), ends
