"""Text to token ids and back, by the folder's tokenizer.json; one without works with token lists. Knows nothing of JAX."""

from pathlib import Path

import tokenizers

from mla_jax.base.errors import BadFile, BadRequest, printable
from mla_jax.base.files import read_json

MAX_TOKENIZER = 64 << 20
MAX_TOKENIZER_CONFIG = 16 << 20


class Tokenizer:
    """`bos_id` is None where the model uses no BOS token."""

    def __init__(self, model: tokenizers.Tokenizer, bos_id: int | None):
        self.model, self.bos_id = model, bos_id

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int, bos_token_id: int | None) -> "Tokenizer | None":
        """The folder's tokenizer, None if it has none; ids at or above `vocab_size` are refused."""
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        if path.stat().st_size > MAX_TOKENIZER:
            raise BadFile(f"{path.name} is too large", f"found {path.stat().st_size:,} bytes, the limit is {MAX_TOKENIZER:,}")
        try:
            model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises bare Exception
            raise BadFile(f"{path.name} is refused by the tokenizers library", printable(str(e), 300)) from e
        highest = max(model.get_vocab(with_added_tokens=True).values(), default=-1)
        if highest >= vocab_size:
            raise BadFile(
                f"{path.name} has token ids the model lacks", f"found id {highest:,}, config.json says vocab_size {vocab_size:,}"
            )
        return cls(model, _bos_id(model, folder / "tokenizer_config.json", bos_token_id))

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Token ids of `text`, the model's BOS token once in front if `bos`. Raises BadRequest for text that is no Unicode."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:  # half of a surrogate pair, or a byte that was no UTF-8
            raise BadRequest("the text is not valid Unicode", f"character {e.start:,} is {printable(text[e.start])}") from e
        ids = self.model.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if bos and self.bos_id is not None and ids[:1] != [self.bos_id] else ids

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` without control tokens."""
        return self.model.decode(ids, skip_special_tokens=True)


def _bos_id(model: tokenizers.Tokenizer, config: Path, default: int | None) -> int | None:
    """BOS if tokenizer_config.json wants it or, where that says nothing, if the tokenizer itself puts it in front."""
    settings = read_json(config, MAX_TOKENIZER_CONFIG) if config.exists() else {}
    named = settings.get("bos_token")
    named = named.get("content") if isinstance(named, dict) else named
    bos = model.token_to_id(named) if isinstance(named, str) else default
    wanted = settings.get("add_bos_token")
    if wanted and bos is None:
        raise BadFile(f"{config.name} wants a BOS token that tokenizer.json lacks", f"it names {printable(repr(named))}")
    if wanted is None:
        first = model.encode("", add_special_tokens=True).ids[:1]
        wanted = first == [bos]
    return bos if wanted else None
