"""The demo model's corpus, the source of Python's standard library, split by path; and the tokenizer trained on it.

Left out: files that are not UTF-8, generated tables (pydoc_data, encodings), and installed packages."""

import ast
import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import Regex, pre_tokenizers

JUDGED = range(4096, 65537)  # sizes in bytes of the held-out files on which bits per byte are measured
LEFT_OUT = {"site-packages", "pydoc_data", "encodings", "__pycache__"}
BOS, EOS, PAD, USER, ASSISTANT = SPECIALS = (  # DeepSeek-V3's control tokens
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
# DeepSeek-V3's pre-tokenizer, which llama.cpp knows as deepseek-v3
DIGITS = r"\p{N}{1,3}"
CJK = r"[一-龥぀-ゟ゠-ヿ]+"
WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


class File(NamedTuple):
    path: str  # relative to the library
    text: str


def sources(library: Path | None = None) -> list[File]:
    """Every Python file of the library, by path."""
    library = library or Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if LEFT_OUT.isdisjoint(relative.parts) and path.is_file():
            try:
                files.append(File(relative.as_posix(), path.read_bytes().decode("utf-8")))
            except UnicodeDecodeError:
                continue
    return [file for file in files if file.text]


def is_held_out(path: str) -> bool:
    """One path in twenty, the same on every machine and for every version of the library."""
    return hashlib.sha256(path.encode()).digest()[0] < 13


def judged(files: Iterable[File]) -> list[str]:
    """The texts on which bits per byte are measured."""
    return [f.text for f in files if is_held_out(f.path) and len(f.text.encode()) in JUDGED]


def train_tokenizer(texts: Iterable[str], size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of `size` tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (DIGITS, CJK, WORDS)]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def control_ids(tokenizer: tokenizers.Tokenizer) -> tuple[int, int, int, int]:
    """The ids of BOS, EOS, USER and ASSISTANT."""
    bos, eos, user, assistant = (tokenizer.get_vocab()[token] for token in (BOS, EOS, USER, ASSISTANT))
    return bos, eos, user, assistant


class Function(NamedTuple):
    head: str  # from the first decorator to the colon, without indentation
    source: str  # head and body
    summary: str  # the first line of its docstring, or empty


def functions(text: str) -> Iterator[Function]:
    """The functions and methods of a file, without their indentation."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.body[0].lineno != node.lineno:
            head, source = _split(node, lines)
            if head and _parses(source):
                yield Function(head, source, (ast.get_docstring(node) or "").split("\n")[0])


def _split(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[str, str]:
    """The head of a function and all of its source, without indentation; the head is empty if it has no end."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    indent = len(lines[first]) - len(lines[first].lstrip())
    own = [_dedented(line, indent) for line in lines[first : node.end_lineno]]
    body = node.body[0].lineno - 1 - first
    while body > 0 and not own[body - 1].rstrip().endswith(":"):
        body -= 1  # comments between the head and the first statement
    return "".join(own[:body]).rstrip("\n"), "".join(own).rstrip("\n") + "\n"


def _dedented(line: str, indent: int) -> str:
    return line[indent:] if line[:indent].isspace() or not indent else line


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def held_out_heads(files: Iterable[File], count: int, seed: int = 0) -> list[str]:
    """`count` function heads of held-out files, drawn by `seed`, each once."""
    heads = sorted({f.head for file in files if is_held_out(file.path) for f in functions(file.text)})
    return random.Random(seed).sample(heads, count)
