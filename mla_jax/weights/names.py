"""Names tables: where each of our parameters lies in a checkpoint. A layout of names is a Table, a new family a row of it.

A row is (our path, source name, source axes, part): the axes give the source's expected shape, `part` cuts ours out of it.
`{l}` is a layer, `{x}` an expert. Several rows for one path are alternatives; the first is what `export` writes."""

import difflib
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mla_jax.base import axes
from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, MlaJaxError, printable, shortened

PartOf = Callable[[Any, Config], Any]


def whole(w: Any, config: Config) -> Any:
    return w


def key_half(w: Any, config: Config) -> Any:
    """`uk` of kv_b_proj, whose rows are head by head the key's, then the value's."""
    return w.reshape(config.num_attention_heads, -1, w.shape[-1])[:, : config.qk_nope_head_dim]


def value_half(w: Any, config: Config) -> Any:
    return w.reshape(config.num_attention_heads, -1, w.shape[-1])[:, config.qk_nope_head_dim :]


def first_half(w: Any, config: Config) -> Any:
    """An expert's gate, where it lies joined with its up projection; also of packed rows."""
    return w[: w.shape[0] // 2]


def second_half(w: Any, config: Config) -> Any:
    return w[w.shape[0] // 2 :]


class Rule(NamedTuple):
    ours: str
    theirs: str
    axes: str
    part: PartOf = whole


def layered(block: Iterable[Rule], mtp: Iterable[Rule], prefix: str) -> Iterable[Rule]:
    """The rows of every layer, and of the MTP layers, whose numbers go on behind the others'."""
    for r in block:
        yield Rule("layers.{l}." + r.ours, prefix + r.theirs, r.axes, r.part)
        yield Rule("mtp.{l}.block." + r.ours, prefix + r.theirs, r.axes, r.part)
    yield from (Rule("mtp.{l}." + r.ours, prefix + r.theirs, r.axes, r.part) for r in mtp)


class Piece(NamedTuple):
    """A tensor, or one entry of its first axis."""

    name: str
    index: int | None = None


class Origin(NamedTuple):
    """What fills one parameter: its tensors, the axes each has, the pieces to read (one an expert if `stacked`), their part."""

    names: tuple[str, ...]
    axes: tuple[str, ...]
    part: PartOf
    pieces: tuple[Piece, ...]
    stacked: bool


@dataclass(frozen=True)
class Table:
    """The names of one kind of checkpoint; `layer` and `expert` begin the names of a layer's and of an expert's tensors.

    `needless` knows tensors that a model can do without, `described` is what says how many and how large they are, and `error`
    what is raised where the two disagree. `cuts_stacks`: experts that lie in one tensor are read one by one."""

    rules: tuple[Rule, ...]
    layer: str
    expert: str | None
    needless: Callable[[str, Config, Container[str]], bool]
    described: str = "config.json"
    error: type[MlaJaxError] = BadFile
    cuts_stacks: bool = True

    def find(self, path: str, config: Config, present: Mapping[str, Any] | None = None) -> Origin:
        """The source of our parameter `path`: of several rows the first whose tensors are all `present`."""
        found = self.candidates(path, config)
        return next((s for s in found if present is not None and all(n in present for n in s.names)), found[0])

    def candidates(self, path: str, config: Config) -> list[Origin]:
        """What may fill our parameter `path`, a source a row."""
        layer = re.search(r"\.(\d+)\.", path)
        pattern = path if layer is None else path.replace(layer[0], ".{l}.", 1)
        number = 0 if layer is None else int(layer[1]) + (config.num_hidden_layers if path.startswith("mtp.") else 0)
        return [_origin(row, number, config, self.cuts_stacks) for row in self.rules if row.ours == pattern]

    def resolve(self, paths: Iterable[str], config: Config, present: Mapping[str, Any]) -> dict[str, Origin]:
        """The source of every path; raises `error` with all tensors that are missing, not used, or of the wrong shape."""
        sources = {path: self.find(path, config, present) for path in paths}
        wanted = dict.fromkeys(name for source in sources.values() for name in source.names)
        missing = [name for name in wanted if name not in present]
        found = wanted.keys() & present.keys()
        unused = [name for name in present if name not in found and not self.needless(name, config, found)]
        if missing or unused:
            raise self.error(f"the tensors do not fit the model that {self.described} describes", *_listed(missing, unused))
        pairs = [(name, source) for source in sources.values() for name in source.names]
        faults = [fault for name, source in pairs for fault in self._shape_faults(name, source, config, present)]
        if faults:
            raise self.error(f"tensors have other shapes than {self.described} says", *shortened(list(dict.fromkeys(faults))))
        return sources

    def refuse_other_counts(self, config: Config, present: Mapping[str, Any]):
        """A quick look at the counts of layers and experts, before building a model that could be a thousand times theirs."""
        layers = {m[1] for name in present if (m := re.match(self.layer, name))}
        experts = {m[1] for name in present if (m := re.match(self.expert, name))} if self.expert else set()
        faults = []
        if len(layers) < config.num_hidden_layers:
            faults.append(f"num_hidden_layers is {config.num_hidden_layers}, {_shown(self.layer)} has {len(layers)}")
        if experts and len(experts) < (config.n_routed_experts or 0):
            faults.append(f"n_routed_experts is {config.n_routed_experts}, {_shown(self.expert)} has {len(experts)}")
        if faults:
            held = f"the files hold {len(present):,} tensors" if present else "the files hold no tensors"
            example = f", such as {printable(next(iter(present)))}" if present else ""
            raise self.error(f"the tensors do not fit the model that {self.described} describes", *faults, held + example)

    def has_mtp(self, config: Config, present: Mapping[str, Any]) -> bool:
        """Whether the checkpoint holds the MTP layers that the config announces; transformers saves without them."""
        first = str(config.num_hidden_layers)
        found = any((m := re.match(self.layer, name)) and m[1] == first for name in present)
        return config.num_nextn_predict_layers > 0 and found

    def export(self, paths: Mapping[str, Any], config: Config) -> Iterable[tuple[str, Any]]:
        """Our parameters as `(source name, array)`, one at a time: the inverse of loading."""
        for path, value in paths.items():
            source = self.find(path, config)
            if source.part is value_half:
                continue  # written with its other half
            if source.part is key_half:
                value = np.concatenate([value, paths[path.removesuffix("uk") + "uv"]], axis=1)
            pieces = value if source.stacked else [value]
            shape = axes.shape(config, source.axes)
            yield from ((name, piece.reshape(shape)) for name, piece in zip(source.names, pieces, strict=True))

    def _shape_faults(self, name: str, source: Origin, config: Config, present: Mapping[str, Any]) -> Iterable[str]:
        found, expected = tuple(present[name].shape), axes.shape(config, source.axes)
        if found == expected:
            return
        differing = [word for i, word in enumerate(source.axes) if found[i : i + 1] != expected[i : i + 1]]
        reasons = "; ".join(axes.why(config, word) for word in differing or source.axes)
        yield f"{printable(name)}: found {list(found)}, {self.described} says {list(expected)} by {reasons}"


def _origin(row: Rule, layer: int, config: Config, cuts_stacks: bool) -> Origin:
    words, experts = tuple(row.axes.split()), range(config.n_routed_experts or 0)
    if "{x}" in row.theirs:
        names = tuple(row.theirs.format(l=layer, x=x) for x in experts)
        return Origin(names, words, row.part, tuple(map(Piece, names)), True)
    name, stacked = row.theirs.format(l=layer), cuts_stacks and words[0] == "experts" and len(words) == 3
    return Origin((name,), words, row.part, tuple(Piece(name, x) for x in experts) if stacked else (Piece(name),), stacked)


def _shown(pattern: str | None) -> str:
    """A pattern of names as a person would write it."""
    return re.sub(r"\(?\\d\+\)?", "*", pattern or "").replace("\\", "").rstrip(".")


def _listed(missing: list[str], unused: list[str], most: int = 8) -> list[str]:
    lines = []
    for name in missing[:most]:
        near = difflib.get_close_matches(name, unused[:2000], n=1, cutoff=0.8)
        lines.append(f"missing: {name}" + (f" (not used, and near: {printable(near[0])})" if near else ""))
    lines += [f"missing: {len(missing) - most:,} more"] if len(missing) > most else []
    lines += [f"not used: {printable(name, 120)}" for name in unused[:most]]
    return lines + ([f"not used: {len(unused) - most:,} more"] if len(unused) > most else [])
