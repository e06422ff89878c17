"""Fields of an option dataclass that check their values: a rule returns the value, converted, or raises Wrong. No JAX here."""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, cast

from mla_jax.base.axes import MESH_AXES, parse_mesh
from mla_jax.base.errors import BadRequest, shown
from mla_jax.base.files import json_value
from mla_jax.base.grammar import Grammar
from mla_jax.base.logits_processor import LogitsProcessor

LARGEST = 2**63 - 1  # of whole numbers that have no smaller limit
Rule = Callable[[Any], Any]


class Wrong(Exception):
    """A value that breaks a rule; its text says what the rule expects."""


def option(default: Any, rule: Rule, alters: bool = True) -> Any:
    """A dataclass field whose values follow `rule`. `alters`: another value may change answers by more than rounding."""
    return dataclasses.field(default=default, metadata={"rule": rule, "alters": alters})


def check(options: Any, finding: str) -> None:
    """Applies the rules of all fields; raises BadRequest with every fault. For `__post_init__` of a frozen dataclass."""
    faults = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        try:
            object.__setattr__(options, field.name, field.metadata["rule"](value))
        except Wrong as wrong:
            faults.append(f"{field.name} is {shown(value)}, expected {wrong}")
    if faults:
        raise BadRequest(finding, *faults)


def whole(low: int, high: int = LARGEST) -> Rule:
    """A whole number, NumPy's included; True and False are none."""

    def rule(value: Any) -> int:
        if _is(Integral, value) and low <= value <= high:
            return int(value)
        raise Wrong(f"a whole number {_range(low, high)}")

    return rule


def number(low: float, high: float, above: bool = False) -> Rule:
    """A number from `low` to `high`, or greater than `low` if `above`."""

    def rule(value: Any) -> float:
        if _is(Real, value) and low <= value <= high and not (above and value == low):
            return value if isinstance(value, int) else float(value)
        raise Wrong(f"a number above {low:g}, at most {high:g}" if above else f"a number {_range(low, high)}")

    return rule


def share_or_count(most: int) -> Rule:
    """A share above 0 and at most 1, or a whole number from 2 to `most`."""

    def rule(value: Any) -> float:
        if _is(Real, value) and 0 < value <= 1:
            return float(value)
        if _is(Real, value) and 1 < value <= most and value == int(value):
            return int(value)
        raise Wrong(f"a share above 0, at most 1, or a whole number from 2 to {most:,}")

    return rule


def one_of(*names: str, further: Collection[str] = ()) -> Rule:
    """One of these names, or of those that `further` has when a value is checked."""

    def rule(value: Any) -> str:
        known = *names, *further
        if isinstance(value, str) and value in known:
            return str(value)
        raise Wrong("one of " + ", ".join(known))

    return rule


def dtype_name(*names: str) -> Rule:
    """One of `names`, or the dtype of that name of JAX, NumPy or PyTorch, which becomes it."""

    def rule(value: Any) -> str:
        if isinstance(value, type) or callable(value):  # such as np.float32 and jnp.bfloat16
            value = getattr(value, "__name__", None)
        elif hasattr(value, "itemsize"):  # an np.dtype, or torch.bfloat16
            value = str(value)
        return one_of(*names)(value.removeprefix("torch.") if isinstance(value, str) else value)

    return rule


def named_or(method: str, *names: str) -> Rule:
    """One of `names`, or an object with this method."""

    def rule(value: Any) -> Any:
        if not isinstance(value, type) and callable(getattr(value, method, None)):
            return value
        return one_of(*names)(value)

    return rule


def optional(rule: Rule) -> Rule:
    """None, or a value that `rule` takes."""
    return lambda value: None if value is None else rule(value)


def flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise Wrong("True or False")


def text(value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    raise Wrong("text")


def json_object(value: Any) -> str:
    """A JSON object as text, or a table of TOML, which becomes one."""
    try:
        text = json.dumps(value) if isinstance(value, Mapping) else value
        if isinstance(text, str) and isinstance(json_value(text.encode(), "text", BadRequest), dict):
            return text
    except (BadRequest, TypeError, ValueError):
        pass
    raise Wrong("a JSON object, such as '{\"thinking\": true}'")


def grammar(value: Any) -> Grammar:
    """A Grammar, or an object that names one."""
    try:
        return Grammar.of(value)
    except BadRequest as e:
        raise Wrong(f"a grammar that can be used: {'; '.join(map(str, e.args))}") from e


def logits_processor(value: Any) -> LogitsProcessor:
    """A LogitsProcessor, or a function, which becomes one without a state."""
    if isinstance(value, LogitsProcessor):
        return value
    if callable(value):
        return LogitsProcessor(cast(Callable, value))
    raise Wrong("a function of (logits, tokens, state), or a LogitsProcessor")


def path(value: Any) -> str:
    """A path as text."""
    if isinstance(value, str | os.PathLike) and isinstance(found := os.fspath(value), str) and found:
        return found
    raise Wrong("a path")


def texts(most: int) -> Rule:
    """One text, or up to `most`; none of them empty. Always a tuple."""

    def rule(value: Any) -> tuple[str, ...]:
        found = (value,) if isinstance(value, str) else _several(value, most)
        if all(isinstance(item, str) and item for item in found):
            return found
        raise Wrong("a text or texts, none of them empty")

    return rule


def token_ids(most: int) -> Rule:
    """One token id, or up to `most`. Always a tuple."""
    each = whole(0, 2**31 - 1)

    def rule(value: Any) -> tuple[int, ...]:
        found = (value,) if isinstance(value, Integral) else _several(value, most)
        return tuple(map(each, found))

    return rule


def biases(most: int) -> Rule:
    """Up to `most` numbers from -100 to 100 by token id, which JSON and TOML write as text."""
    token = whole(0, 2**31 - 1)
    bias = number(-100, 100)

    def rule(value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping) or len(value) > most:
            raise Wrong(f"at most {most} numbers by token id")
        return {token(_number_of(key)): float(bias(one)) for key, one in value.items()}

    return rule


def mesh(value: Any) -> Any:
    """The sizes of a mesh as text or by axis, which become text; "auto"; or a `jax.sharding.Mesh`."""
    if hasattr(value, "axis_names"):
        return value
    if value == "auto":
        return "auto"
    try:
        sizes = parse_mesh(value) if isinstance(value, str | Mapping) else {}
    except BadRequest:
        sizes = {}
    if sizes:
        return ",".join(f"{axis}={size}" for axis, size in sizes.items())
    raise Wrong(f"{','.join(f'{axis}=N' for axis in MESH_AXES)} with some of these axes, or auto")


def _number_of(key: Any) -> Any:
    """A key of digits as the number that they write."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12 else key


def _is(kind: type, value: Any) -> bool:
    """Whether `value` is such a number; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _several(value: Any, most: int) -> tuple:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray | Mapping):
        raise Wrong(f"one value or up to {most}")
    found = tuple(itertools.islice(value, most + 1))
    if len(found) > most:
        raise Wrong(f"at most {most}")
    return found


def _range(low: float, high: float) -> str:
    return f"{low:,g} to {high:,g}" if high < 2**31 else f"from {low:,g}"
