"""Name tables: which tensor of a checkpoint holds each of our parameters. A naming scheme is a NameTable of NameRules.

A NameRule is (our path, source name, source axes, part): the axes give the expected shape of the source tensor, `part` slices our
parameter out of it. `{l}` is a layer number, `{x}` an expert number; where layers are counted in pairs `{pair}` is the number of
one, and `{half}` 0 or 1 in it. Several rules with one path are alternatives, tried in
order; `export` writes the first."""

import difflib
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from mla_jax.base import axes
from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, MlaJaxError, printable, shortened
from mla_jax.weights.boxes import Box

PartOf = Callable[[Any, Config], Any]


def unchanged(w: Any, config: Config) -> Any:
    return w


def key_half(w: Any, config: Config) -> Any:
    """`uk` of kv_b_proj, or of some heads of it: the rows of each head are the key's, then the value's."""
    return _by_head(w, config)[:, : config.qk_nope_head_dim]


def value_half(w: Any, config: Config) -> Any:
    """`uv` of kv_b_proj, or of some heads of it."""
    return _by_head(w, config)[:, config.qk_nope_head_dim :]


def _by_head(w: Any, config: Config) -> Any:
    return w.reshape(-1, rows_of_head(config), w.shape[-1])


def rows_of_head(config: Config) -> int:
    """Rows of kv_b_proj that one head has."""
    return config.qk_nope_head_dim + config.v_head_dim


def first_half(w: Any, config: Config) -> Any:
    """The gate of an expert's fused gate_up projection; works on packed rows too."""
    return w[: w.shape[0] // 2]


def second_half(w: Any, config: Config) -> Any:
    """The up projection of an expert's fused gate_up projection; works on packed rows too."""
    return w[w.shape[0] // 2 :]


class NameRule(NamedTuple):
    """Our parameter `ours` is `part` of the source tensor `theirs`, which has the logical `axes`."""

    ours: str
    theirs: str
    axes: str
    part: PartOf = unchanged


def layered(block: Iterable[NameRule], mtp: Iterable[NameRule], prefix: str) -> Iterable[NameRule]:
    """The rules of every layer and of the MTP layers, whose numbers continue after the last layer's."""
    for rule in block:
        yield NameRule("layers.{l}." + rule.ours, prefix + rule.theirs, rule.axes, rule.part)
        yield NameRule("mtp.{l}.block." + rule.ours, prefix + rule.theirs, rule.axes, rule.part)
    for rule in mtp:
        yield NameRule("mtp.{l}." + rule.ours, prefix + rule.theirs, rule.axes, rule.part)


class Piece(NamedTuple):
    """A source tensor, or one entry of its first axis; with a `box`, that part of it."""

    name: str
    index: int | None = None
    box: Box | None = None


class Origin(NamedTuple):
    """Where one parameter comes from: its source tensors and their axes, the pieces to read, and the `part` to take of each.

    `stacked`: the parameter is a stack, with one piece per expert."""

    names: tuple[str, ...]
    axes: tuple[str, ...]
    part: PartOf
    pieces: tuple[Piece, ...]
    stacked: bool

    def one_by_one(self, experts: Sequence[int]) -> "Origin":
        """The same for a stack of these experts, each read by itself."""
        pieces = [self.pieces[x] if self.stacked else Piece(self.names[0], x) for x in experts]
        return self._replace(pieces=tuple(pieces), stacked=True)


@dataclass(frozen=True)
class NameTable:
    """The naming scheme of one kind of checkpoint.

    `layer` and `expert` are regular expressions that match the start of the names of a layer's and an expert's tensors.
    `needless` recognises tensors that no model needs. `described` says where the config comes from, for errors, and `error` is
    the type raised if tensors and config disagree. `cuts_stacks`: experts that are stored in one tensor are read one by one."""

    rules: tuple[NameRule, ...]
    layer: str
    expert: str | None
    needless: Callable[[str, Config, Container[str]], bool]
    described: str = "config.json"
    error: type[MlaJaxError] = BadFile
    cuts_stacks: bool = True

    def under(self, prefix: str, needless: Callable[[str, Config, Container[str]], bool]) -> "NameTable":
        """The same scheme with all names behind a prefix."""
        return replace(
            self,
            rules=tuple(rule._replace(theirs=prefix + rule.theirs) for rule in self.rules),
            layer=re.escape(prefix) + self.layer,
            expert=self.expert and re.escape(prefix) + self.expert,
            needless=needless,
        )

    def find(self, path: str, config: Config, present: Mapping[str, Any] | None = None) -> Origin:
        """The origin of our parameter `path`: the first alternative whose tensors are all `present`, else the first."""
        found = self.candidates(path, config)
        if not found:
            raise self.error(
                f"{self.described} describes a model with {path}, which checkpoints of this kind do not hold"
            )
        for origin in found:
            if present is not None and all(name in present for name in origin.names):
                return origin
        return found[0]

    def candidates(self, path: str, config: Config) -> list[Origin]:
        """All alternatives for our parameter `path`, one per rule."""
        pattern, number = path, 0
        if layer := re.search(r"\.(\d+)\.", path):
            pattern = path.replace(layer[0], ".{l}.", 1)
            number = int(layer[1]) + (config.num_hidden_layers if path.startswith("mtp.") else 0)
        return [
            _origin(rule, number, config, self.cuts_stacks) for rule in self.rules if rule.ours == pattern
        ]

    def resolve(self, paths: Iterable[str], config: Config, present: Mapping[str, Any]) -> dict[str, Origin]:
        """The origin of every path; raises `error` with all tensors that are missing, unused, or of the wrong shape."""
        origins = {path: self.find(path, config, present) for path in paths}
        self._refuse_other_names(origins, config, present)
        faults: dict[str, None] = {}  # in order, each once
        for origin in origins.values():
            for name in origin.names:
                faults.update(dict.fromkeys(self._shape_faults(name, origin, config, present)))
        if faults:
            raise self.error(
                f"tensors have other shapes than {self.described} says", *shortened(list(faults))
            )
        return origins

    def refuse_other_counts(self, config: Config, present: Mapping[str, Any]):
        """A quick check of the numbers of layers and experts, before building a model that could be a thousand times larger."""
        layers, experts = _matched(self.layer, present), _matched(self.expert, present)
        faults = []
        if len(layers) < config.num_hidden_layers:
            faults.append(
                f"num_hidden_layers is {config.num_hidden_layers}, {_shown(self.layer)} has {len(layers)}"
            )
        if experts and len(experts) < (config.n_routed_experts or 0):
            faults.append(
                f"n_routed_experts is {config.n_routed_experts}, {_shown(self.expert)} has {len(experts)}"
            )
        if faults:
            raise self.error(
                f"the tensors do not fit the model that {self.described} describes",
                *faults,
                _counted(present),
            )

    def has_mtp(self, config: Config, present: Mapping[str, Any]) -> bool:
        """Whether the checkpoint holds the MTP layers that the config announces; transformers saves without them."""
        first = str(config.num_hidden_layers)
        return config.num_nextn_predict_layers > 0 and first in _matched(self.layer, present)

    def export(self, paths: Mapping[str, Any], config: Config) -> Iterable[tuple[str, Any]]:
        """Our parameters as `(source name, array)`, one at a time: the inverse of loading."""
        for path, value in paths.items():
            origin = self.find(path, config)
            if origin.part is value_half:
                continue  # written with the key half
            if origin.part is key_half:
                value = np.concatenate([value, paths[path.removesuffix("uk") + "uv"]], axis=1)
            pieces = value if origin.stacked else [value]
            shape = axes.shape(config, origin.axes)
            for name, piece in zip(origin.names, pieces, strict=True):
                yield name, piece.reshape(shape)

    def _refuse_other_names(self, origins: Mapping[str, Origin], config: Config, present: Mapping[str, Any]):
        expected: dict[str, None] = {}  # in order, each once
        for origin in origins.values():
            expected.update(dict.fromkeys(origin.names))
        missing = [name for name in expected if name not in present]
        found = expected.keys() & present.keys()
        unused = [name for name in present if name not in found and not self.needless(name, config, found)]
        if missing or unused:
            raise self.error(
                f"the tensors do not fit the model that {self.described} describes", *_listed(missing, unused)
            )

    def _shape_faults(
        self, name: str, origin: Origin, config: Config, present: Mapping[str, Any]
    ) -> Iterable[str]:
        found, expected = tuple(present[name].shape), axes.shape(config, origin.axes)
        if found == expected:
            return
        differing = [word for i, word in enumerate(origin.axes) if found[i : i + 1] != expected[i : i + 1]]
        reasons = "; ".join(axes.why(config, word) for word in differing or origin.axes)
        yield f"{printable(name)}: found {list(found)}, {self.described} says {list(expected)} by {reasons}"


def _origin(rule: NameRule, layer: int, config: Config, cuts_stacks: bool) -> Origin:
    words, experts = tuple(rule.axes.split()), range(config.n_routed_experts or 0)
    if "{x}" in rule.theirs:
        names = tuple(_numbered(rule.theirs, layer, x=x) for x in experts)
        return Origin(names, words, rule.part, tuple(map(Piece, names)), stacked=True)
    name = _numbered(rule.theirs, layer)
    stacked = cuts_stacks and words[0] == "experts" and len(words) == 3
    pieces = tuple(Piece(name, x) for x in experts) if stacked else (Piece(name),)
    return Origin((name,), words, rule.part, pieces, stacked)


def _numbered(name: str, layer: int, **numbers: int) -> str:
    return name.format(l=layer, pair=layer // 2, half=layer % 2, **numbers)


def _matched(pattern: str | None, names: Iterable[str]) -> set[str]:
    """The different numbers, as text, that the first group of `pattern` finds at the start of `names`."""
    if pattern is None:
        return set()
    matches = (re.match(pattern, name) for name in names)
    return {m[1] for m in matches if m}


def _shown(pattern: str | None) -> str:
    """A pattern of names as a person would write it."""
    return re.sub(r"\(?\\d\+\)?", "*", pattern or "").replace("\\", "").rstrip(".")


def _counted(present: Mapping[str, Any]) -> str:
    if not present:
        return "the files hold no tensors"
    return f"the files hold {len(present):,} tensors, such as {printable(next(iter(present)))}"


def _listed(missing: list[str], unused: list[str], most: int = 8) -> list[str]:
    lines = [_missing(name, unused) for name in missing[:most]]
    if len(missing) > most:
        lines.append(f"missing: {len(missing) - most:,} more")
    lines += [f"not used: {printable(name, 120)}" for name in unused[:most]]
    if len(unused) > most:
        lines.append(f"not used: {len(unused) - most:,} more")
    return lines


def _missing(name: str, unused: list[str]) -> str:
    near = difflib.get_close_matches(name, unused[:2000], n=1, cutoff=0.8)
    return f"missing: {name}" + (f" (not used, but similar: {printable(near[0])})" if near else "")
