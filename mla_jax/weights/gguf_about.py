"""The words of a GGUF file on itself (`general.*`): its kind, of which only models are opened, and its name, size and maker."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mla_jax.base.errors import Unsupported, printable

_MODEL = "model"
# general.type -> what the file is, and what to do
_OTHER_KINDS = {
    "adapter": (
        "an adapter, which changes some weights of a model",
        "merge it into its model, and open that",
    ),
    "imatrix": (
        "an importance matrix, by which models are quantised",
        "open the model that was quantised with it",
    ),
    "mmproj": (
        "the part of a model that sees or hears",
        "open the file of its language model",
    ),
    "controlvector": (
        "a control vector, which is added to the states of a model",
        "open a model",
    ),
    "vocabulary": (
        "a vocabulary, without the weights of a model",
        "open the file with the weights",
    ),
}
# the same by general.architecture: files before general.type, and those that have no type of their own
_KIND_OF_ARCHITECTURE = {"clip": "mmproj", "controlvector": "controlvector"}
# general.file_type, as llama.cpp numbers what most matrices are quantised to
_FILE_TYPES = {
    number: name
    for first, names in {
        0: "F32 F16 Q4_0 Q4_1",
        7: "Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ2_XXS IQ2_XS Q2_K_S IQ3_XS",
        23: "IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16",
        36: "TQ1_0 TQ2_0 MXFP4_MOE NVFP4 Q1_0 Q2_0",
    }.items()
    for number, name in enumerate(names.split(), first)
}
_GUESSED = 1024  # is added to a type that the file did not name
_LINKS = ("general.url", "general.repo_url", "general.source.url", "general.source.repo_url")
_SHOWN = 200  # characters of a text of the file


def refuse_other_kinds(metadata: Mapping[str, Any], tensors: Collection[str], name: str) -> None:
    """Raises Unsupported for a file, called `name`, that is no model."""
    found = metadata.get("general.type", _MODEL)
    architecture = metadata.get("general.architecture")
    kind = found if isinstance(found, str) else _MODEL
    if isinstance(architecture, str):
        kind = _KIND_OF_ARCHITECTURE.get(architecture, kind)
    if kind == _MODEL and not tensors and "tokenizer.ggml.tokens" in metadata:
        kind = "vocabulary"
    if kind in _OTHER_KINDS:
        what, advice = _OTHER_KINDS[kind]
        raise Unsupported(f"{name} is {what}", *_told(metadata), advice)


def _told(metadata: Mapping[str, Any]) -> Iterator[str]:
    """The keys that tell what the file is, and what it belongs to."""
    keys = (
        "general.type",
        "general.architecture",
        "adapter.type",
        "general.name",
        "general.base_model.0.name",
    )
    for key in keys:
        if isinstance(found := metadata.get(key), str):
            yield f"{key} is {printable(found)}"


def self_description(metadata: Mapping[str, Any]) -> str | None:
    """A line: name, size, type of most matrices, who quantised it, a link; None for a file that says none of these."""
    return ", ".join(_parts(metadata)) or None


def _parts(metadata: Mapping[str, Any]) -> Iterator[str]:
    name, base, size, maker = (
        _text(metadata, f"general.{key}") for key in ("name", "basename", "size_label", "quantized_by")
    )
    if name or base:
        yield name or base
    if name and base and _plain(base) not in _plain(name):
        yield f"of {base}"
    if size:
        yield size
    number = metadata.get("general.file_type")
    if type(number) is int and (kind := _FILE_TYPES.get(number & ~_GUESSED)):
        yield f"mostly {kind}"
    if maker:
        yield f"quantised by {maker}"
    links = (_text(metadata, key) for key in _LINKS)
    if link := next(filter(None, links), None):
        yield link


def _plain(name: str) -> str:
    return name.replace("-", " ").casefold()


def _text(metadata: Mapping[str, Any], key: str) -> str:
    found = metadata.get(key)
    return printable(found, _SHOWN) if isinstance(found, str) else ""
