"""Text to token ids and back, by the folder's tokenizer.json or tiktoken.model; a folder without either works with token ids.

Control tokens are the added tokens, special or not; what a user types never becomes one unless that is requested. A file of a
form that we do not know works in a process of its own (`guard.py`). No JAX here."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from mla_jax.base.errors import BadFile, BadRequest, MlaJaxError, printable, shown
from mla_jax.base.files import parse_json, read_bounded, read_json
from mla_jax.text import byte_level, forms, tiktoken_model
from mla_jax.text.guard import Guard
from mla_jax.text.untrusted import read_as_text

MAX_TOKENIZER = 64 << 20
MAX_TOKENIZER_CONFIG = 16 << 20
MAX_CONTROLS = 10_000  # the time to find them in a text grows with their number
MAX_TEXT = 8 << 20  # bytes; a million tokens are about half of it


class InProcess:
    """A tokenizer whose form is known, so that it needs no limits. `begins`: the ids it puts in front, as `Guard` has them."""

    def __init__(self, model: tokenizers.Tokenizer, controls: list[str]):
        self.model = model
        read_as_text(model, controls)
        with refusing(BadFile, "the tokenizer cannot encode an empty text"):
            self.begins: list[int] = model.encode("", add_special_tokens=True).ids[:1]

    def encode(self, text: str) -> list[int]:
        with refusing(BadRequest, "the tokenizer cannot encode the text"):
            return self.model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        with refusing(BadFile, "the tokenizer cannot decode its tokens"):
            return self.model.decode(ids, skip_special_tokens=False)


@contextmanager
def refusing(error: type[MlaJaxError], found: str) -> Iterator[None]:
    """Raises `error` where the tokenizers library fails: it raises bare Exception, and a BaseException where its code panics."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:
        raise error(found, printable(str(e), 300)) from e


class Tokenizer:
    """`bos_id` is None where the model uses no BOS token; `hidden` are the special ids, which have no text,
    `control` the control tokens and their ids."""

    def __init__(
        self, model: tokenizers.Tokenizer, bos_id: int | None, codec: InProcess | Guard | None = None
    ):
        """`model` knows the vocabulary, and works on text itself if there is no `codec` to do that."""
        self.model, self.bos_id = model, bos_id
        self.eos_id: int | None = None  # as tokenizer_config.json names it
        added = model.get_added_tokens_decoder()
        self.hidden = {i for i, token in added.items() if token.special}
        self._added = {i: token.content for i, token in added.items()}
        self._pieces: dict[int, bytes] = {}  # of the tokens seen so far
        controls = {i: token for i, token in added.items() if _is_control(token)}
        self.control = {token.content: i for i, token in controls.items()}
        if len(controls) > MAX_CONTROLS:
            raise BadFile(
                f"the tokenizer has {len(controls):,} control tokens", f"the limit is {MAX_CONTROLS:,}"
            )
        self.control_pattern = _pattern_of(controls.values())
        self.byte_level = isinstance(model.decoder, decoders.ByteLevel)
        self.codec = codec or InProcess(model, [*self.control])

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int, bos_token_id: int | None) -> "Tokenizer | None":
        """The folder's tokenizer, None if it has none; ids at or above `vocab_size` are refused."""
        path, ranks, config = (
            folder / name for name in ("tokenizer.json", "tiktoken.model", "tokenizer_config.json")
        )
        if not path.exists() and not ranks.exists():
            return None
        settings = read_json(config, MAX_TOKENIZER_CONFIG) if config.exists() else {}
        if path.exists():
            tokenizer = cls._from_json(path)
        else:
            data, path = read_bounded(ranks, tiktoken_model.MAX_TIKTOKEN_FILE), ranks
            tokenizer = cls(tiktoken_model.build(data, ranks.name, settings, vocab_size), None)
        highest = max(tokenizer.model.get_vocab(with_added_tokens=True).values(), default=-1)
        if highest >= vocab_size:
            raise BadFile(
                f"{path.name} has token ids the model lacks",
                f"found id {highest:,}, config.json says vocab_size {vocab_size:,}",
            )
        tokenizer.bos_id = tokenizer._bos_id(settings, bos_token_id)
        tokenizer.eos_id = tokenizer._eos_id(settings)
        return tokenizer

    @classmethod
    def _from_json(cls, path: Path) -> "Tokenizer":
        content = parse_json(read_bounded(path, MAX_TOKENIZER), path.name)
        known = forms.known(content)
        with refusing(BadFile, f"{path.name} is refused by the tokenizers library"):
            text = json.dumps(content)
            model = tokenizers.Tokenizer.from_str(json.dumps(known or forms.inert(content)))
        _check_added(model, content, path.name)
        if known:
            return cls(model, None)
        controls = [
            token.content for token in model.get_added_tokens_decoder().values() if _is_control(token)
        ]
        return cls(model, None, Guard(text, path.name, controls))

    def encode(self, text: str, bos: bool = True, control: bool = False) -> list[int]:
        """Token ids of `text`, the model's BOS token once in front if `bos`.

        Control tokens in `text` are plain text, or control tokens if `control`. Raises BadRequest for what is not text, not
        valid Unicode or longer than MAX_TEXT."""
        check_text(text)
        ids = self._with_control(text) if control else self._plain(text)
        return self.with_bos(ids) if bos else ids

    def with_bos(self, ids: list[int]) -> list[int]:
        """`ids` behind the model's BOS token, which is not given twice."""
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def control_id(self, found: str) -> int:
        """The id of what `control_pattern` found, which may be a control token with the spaces it takes along."""
        return self.control[found if found in self.control else found.strip()]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` without special tokens; an id that the tokenizer lacks has no text."""
        check_ids(ids)
        if self.byte_level:
            return b"".join(map(self.piece, ids)).decode("utf-8", "replace")
        return self.codec.decode([i for i in ids if i not in self.hidden])

    def piece(self, token: int) -> bytes:
        """The bytes that `token` adds to the text, for a byte-level tokenizer.

        An added token is its own text. (The library decodes the "ü" that older DeepSeek folders add as a byte.)"""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self._make_piece(token)
        return found

    def _make_piece(self, token: int) -> bytes:
        if token in self.hidden:
            return b""
        if token in self._added:
            return self._added[token].encode("utf-8", "replace")
        return byte_level.to_bytes(self.model.id_to_token(token) or "")

    def _plain(self, text: str) -> list[int]:
        ids = self.codec.encode(text)
        if forged := set(ids).intersection(self.control.values()):
            names = ", ".join(printable(self._added[i]) for i in sorted(forged)[:5])
            raise BadRequest(
                "the text has a part that this tokenizer can only write as a control token",
                f"that is {names}",
            )
        return ids

    def _with_control(self, text: str) -> list[int]:
        ids, end = [], 0
        for found in self.control_pattern.finditer(text):
            ids += [*self._plain(text[end : found.start()]), self.control_id(found[0])]
            end = found.end()
        return ids + self._plain(text[end:])

    def _eos_id(self, settings: dict) -> int | None:
        named = _text_of(settings.get("eos_token"))
        return None if named is None else self.model.token_to_id(named)

    def _bos_id(self, settings: dict, default: int | None) -> int | None:
        """BOS if tokenizer_config.json asks for it or, if that says nothing, if the tokenizer itself puts it in front."""
        named = _text_of(settings.get("bos_token"))
        bos = default if named is None else self.model.token_to_id(named)
        wanted = settings.get("add_bos_token")
        if wanted and bos is None:
            raise BadFile(
                "tokenizer_config.json asks for a BOS token that the tokenizer lacks",
                f"it names {shown(named)}",
            )
        return bos if wanted or (wanted is None and self.codec.begins == [bos]) else None


def _text_of(token: Any) -> str | None:
    """A token as tokenizer_config.json names it: its text, or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def check_text(text: Any):
    """Raises BadRequest for anything but text, for long text, and for half a surrogate pair or a byte that was not UTF-8."""
    if not isinstance(text, str):
        raise BadRequest("a prompt or message is not text", f"found {type(text).__name__}")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as e:
        raise BadRequest(
            "the text is not valid Unicode", f"character {e.start:,} is {printable(text[e.start])}"
        ) from e
    if size > MAX_TEXT:
        raise BadRequest(
            f"the text is too long: {size:,} bytes",
            f"the limit is {MAX_TEXT:,}, far beyond any model's context",
        )


def check_ids(ids: Any):
    """Raises BadRequest unless `ids` is a list of token ids: whole numbers of 0 or more, 32 bits wide."""
    if not isinstance(ids, list | tuple):
        raise BadRequest("what is to be decoded is not a list of token ids", f"found {type(ids).__name__}")
    if wrong := [i for i in ids if type(i) is not int or not 0 <= i < 1 << 32]:
        raise BadRequest(
            "a token id is a whole number of 0 or more, 32 bits wide", f"found {shown(wrong[0])}"
        )


def _check_added(model: tokenizers.Tokenizer, content: dict, where: str):
    """Raises BadFile for an added token to which the library gives another id than the file."""
    for token in content.get("added_tokens", []):
        name = token["content"]
        given = token["id"]
        found = model.token_to_id(token["content"])
        if found != given:
            expected = f"{printable(name)} has id {shown(given)}, the vocabulary leaves it {found}"
            raise BadFile(f"{where} has added tokens with ids that do not fit its vocabulary", expected)


def _is_control(token: tokenizers.AddedToken) -> bool:
    """A single character or blanks, if not special, are text: DeepSeek's older folders have letters like "ü" added."""
    return token.special or (len(token.content) > 1 and not token.content.isspace())


def _pattern_of(controls: Iterable[tokenizers.AddedToken]) -> re.Pattern[str]:
    """A pattern that finds each of `controls`, the longest first."""
    patterns = [_pattern(token) for token in sorted(controls, key=lambda token: -len(token.content))]
    return re.compile("|".join(patterns) or "(?!)")


def _pattern(token: tokenizers.AddedToken) -> str:
    word = re.escape(token.content)
    word = rf"(?<!\w){word}(?!\w)" if token.single_word else word
    # Matched only from where a run of them begins, so that a long one takes linear time
    blanks = r"(?:(?<!\s)\s++)?"
    return (blanks if token.lstrip else "") + word + (r"\s*+" if token.rstrip else "")
