"""Text to token ids and back, by the folder's tokenizer.json or tiktoken.model; a folder without either works with token lists.

Control tokens are the added tokens, special or not; what a user types never becomes one unless asked. Knows nothing of JAX."""

import json
import re
from pathlib import Path

import tokenizers
from tokenizers import decoders

from mla_jax.base.errors import BadFile, BadRequest, printable
from mla_jax.base.files import read_json
from mla_jax.text import byte_level, tiktoken_model

MAX_TOKENIZER = 64 << 20
MAX_TOKENIZER_CONFIG = 16 << 20


class Tokenizer:
    """`bos_id` is None where the model uses no BOS token; `hidden` are the special ids, which have no text,
    `control` the control tokens and their ids."""

    def __init__(self, model: tokenizers.Tokenizer, bos_id: int | None):
        self.model, self.bos_id = model, bos_id
        added = model.get_added_tokens_decoder()
        self.hidden = {i for i, token in added.items() if token.special}
        self._added = {i: token.content for i, token in added.items()}
        controls = [token for token in added.values() if _is_control(token)]
        self.control = {token.content: i for i, token in added.items() if _is_control(token)}
        self.control_pattern = re.compile("|".join(map(_pattern, sorted(controls, key=lambda t: -len(t.content)))) or "(?!)")
        self.byte_level = isinstance(model.decoder, decoders.ByteLevel)
        # from here on the model sees control tokens as text; `encode` finds them itself
        model.add_special_tokens(controls)
        model.encode_special_tokens = True
        model.no_truncation()
        model.no_padding()

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int, bos_token_id: int | None) -> "Tokenizer | None":
        """The folder's tokenizer, None if it has none; ids at or above `vocab_size` are refused."""
        path, ranks, config = (folder / name for name in ("tokenizer.json", "tiktoken.model", "tokenizer_config.json"))
        if not path.exists() and not ranks.exists():
            return None
        settings = read_json(config, MAX_TOKENIZER_CONFIG) if config.exists() else {}
        if path.exists():
            model = _from_json(path)
        else:
            path, model = ranks, tiktoken_model.build(_content(ranks, tiktoken_model.MAX_FILE), ranks.name, settings, vocab_size)
        highest = max(model.get_vocab(with_added_tokens=True).values(), default=-1)
        if highest >= vocab_size:
            raise BadFile(
                f"{path.name} has token ids the model lacks", f"found id {highest:,}, config.json says vocab_size {vocab_size:,}"
            )
        return cls(model, _bos_id(model, settings, bos_token_id))

    def encode(self, text: str, bos: bool = True, control: bool = False) -> list[int]:
        """Token ids of `text`, the model's BOS token once in front if `bos`.

        Control tokens in `text` are plain text, or control tokens if `control`. Raises BadRequest for text that is no Unicode."""
        check_unicode(text)
        ids = self._with_control(text) if control else self._plain(text)
        return self.with_bos(ids) if bos else ids

    def with_bos(self, ids: list[int]) -> list[int]:
        """`ids` behind the model's BOS token, which is not given twice."""
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def control_id(self, found: str) -> int:
        """The id of what `control_pattern` found, which may be a control token with the spaces it takes along."""
        return self.control[found if found in self.control else found.strip()]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` without special tokens."""
        if self.byte_level:
            return b"".join(map(self.piece, ids)).decode("utf-8", "replace")
        return self.model.decode([i for i in ids if i not in self.hidden], skip_special_tokens=False)

    def piece(self, token: int) -> bytes:
        """What `token` adds to the text, for a byte-level tokenizer.

        An added token stands for its own text. (The library takes the "ü" that older DeepSeek folders add for a byte.)"""
        if token in self.hidden:
            return b""
        if token in self._added:
            return self._added[token].encode("utf-8", "replace")
        return byte_level.to_bytes(self.model.id_to_token(token) or "")

    def _plain(self, text: str) -> list[int]:
        try:
            ids = self.model.encode(text, add_special_tokens=False).ids
        except Exception as e:  # the library raises bare Exception
            raise BadRequest("the tokenizer cannot encode the text", printable(str(e), 200)) from e
        if forged := set(ids).intersection(self.control.values()):
            names = ", ".join(printable(self._added[i]) for i in sorted(forged)[:5])
            raise BadRequest("the text holds something this tokenizer can only write as a control token", f"that is {names}")
        return ids

    def _with_control(self, text: str) -> list[int]:
        ids, end = [], 0
        for found in self.control_pattern.finditer(text):
            ids += [*self._plain(text[end : found.start()]), self.control_id(found[0])]
            end = found.end()
        return ids + self._plain(text[end:])


def check_unicode(text: str):
    """Raises BadRequest for half of a surrogate pair, or a byte that was no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise BadRequest("the text is not valid Unicode", f"character {e.start:,} is {printable(text[e.start])}") from e


def _is_control(token: tokenizers.AddedToken) -> bool:
    """A single character or blanks, if not special, are text: DeepSeek's older folders have letters like "ü" added."""
    return token.special or (len(token.content) > 1 and not token.content.isspace())


def _pattern(token: tokenizers.AddedToken) -> str:
    word = re.escape(token.content)
    word = rf"(?<!\w){word}(?!\w)" if token.single_word else word
    blanks = r"(?:(?<!\s)\s++)?"  # looked for where a run of them begins: a long one takes linear time
    return (blanks if token.lstrip else "") + word + (r"\s*+" if token.rstrip else "")


def _content(path: Path, limit: int) -> bytes:
    if not path.is_file():  # opening a pipe would wait for ever
        raise BadFile(f"{path.name} is not a regular file", str(path))
    if path.stat().st_size > limit:
        raise BadFile(f"{path.name} is too large", f"found {path.stat().st_size:,} bytes, the limit is {limit:,}")
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError as e:
        raise BadFile(f"{path.name} cannot be read", printable(e.strerror or str(e))) from e


def _from_json(path: Path) -> tokenizers.Tokenizer:
    data = _content(path, MAX_TOKENIZER)
    try:
        model = tokenizers.Tokenizer.from_buffer(data)
        added = {token["content"]: token["id"] for token in json.loads(data).get("added_tokens", [])}
    except BaseException as e:  # the library raises bare Exception, and BaseException where its own code fails
        if isinstance(e, KeyboardInterrupt | SystemExit):
            raise
        raise BadFile(f"{path.name} is refused by the tokenizers library", printable(str(e), 300)) from e
    if moved := [name for name, i in added.items() if model.token_to_id(name) != i]:  # the library gives such a token another id
        expected = f"{printable(moved[0])} has id {added[moved[0]]}, the vocabulary leaves it {model.token_to_id(moved[0])}"
        raise BadFile(f"{path.name} has added tokens with ids that do not fit its vocabulary", expected)
    return model


def _bos_id(model: tokenizers.Tokenizer, settings: dict, default: int | None) -> int | None:
    """BOS if tokenizer_config.json wants it or, where that says nothing, if the tokenizer itself puts it in front."""
    named = settings.get("bos_token")
    named = named.get("content") if isinstance(named, dict) else named
    bos = model.token_to_id(named) if isinstance(named, str) else default
    wanted = settings.get("add_bos_token")
    if wanted and bos is None:
        raise BadFile("tokenizer_config.json wants a BOS token that the tokenizer lacks", f"it names {printable(repr(named))}")
    if wanted is None:
        first = model.encode("", add_special_tokens=True).ids[:1]
        wanted = first == [bos]
    return bos if wanted else None
