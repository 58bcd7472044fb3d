"""Overrides of config fields, as strings from a command line.

    apply_overrides(cfg, ["learner.optimizer.learning_rate=3e-4", "model.layers[2].rate=0.1"])

The declared type determines how a string is read: `1e-3` is a float for a float field and a string
for a string field. The arms of a union are tried with `str` last. Unambiguous brackets and quotes
are optional: `data,model`, `('data', 'model')` and `[data, model]` are the same tuple.
"""

import collections.abc
import enum
import functools
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from weft.config import fields, values
from weft.config.config import ConfigBase, Origin
from weft.config.fields import Hint
from weft.config.text_parser import read_value
from weft.config.text_writer import value_text
from weft.errors import (
    ConfigError,
    ConfigOverrideError,
    ConfigTypeError,
    UnknownFieldError,
)

T = TypeVar("T")

_BOOLS = {
    "true": True,
    "1": True,
    "yes": True,
    "false": False,
    "0": False,
    "no": False,
}


class NoConversion(Exception):
    """Signal that a string is not a value of the type; the caller adds the path.

    `cause` is the error of the parser, if the string looks like the text of a value.
    """

    def __init__(self, cause: ConfigError | None = None):
        super().__init__(cause)
        self.cause = cause


Reader = Callable[[str], values.Value]
"""Parser of the text of a value."""


def convert(
    text: str, hint: Hint, read: Reader, like: values.Value = None
) -> values.Value:
    """Converts a string to a value.

    Args:
        read: parses the text of a value, for classes, functions and configs.
        like: a value of the field, such as its default, which determines an undeclared type.

    Raises NoConversion if the string is not a value of that type.

    >>> convert("1e-3", float, eval), convert("a,b", tuple[str, ...], eval)
    (0.001, ('a', 'b'))
    """
    text = text.strip()
    if text == "REQUIRED":
        return values.REQUIRED
    if hint is None or hint is type(None):
        return _lookup_member(text.lower(), {"none": None, "null": None})
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Annotated, typing.Final):
        return convert(text, args[0], read, like)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(text, args, read)
    if origin is typing.Literal:
        options = {str(option): option for option in args}
        options |= {repr(option): option for option in args}
        return _lookup_member(text, options)
    cls = origin or hint
    if cls in _SCALARS:
        try:
            return _SCALARS[cls](text)
        except ValueError:
            raise NoConversion from None
    if isinstance(cls, type) and issubclass(cls, enum.Enum):
        members = {str(member.value): member for member in cls}
        members |= cls.__members__
        return _lookup_member(text.rpartition(".")[2], members)
    if cls in _CONTAINERS:
        return _convert_items(text, cls, args, read)
    if cls in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        key_hint, value_hint = args if len(args) == 2 else (Any, Any)
        mapping: dict[values.Step, values.Value] = {}
        for key_text, child_text in _split_pairs(text):
            key = convert(key_text, key_hint, read)
            mapping[key] = convert(child_text, value_hint, read)
        return mapping
    if isinstance(hint, typing.NewType):
        return convert(text, hint.__supertype__, read, like)
    return _convert_undeclared(text, hint, read, like)


def _lookup_member(text: str, members: Mapping[str, T]) -> T:
    if text not in members:
        raise NoConversion
    return members[text]


def _convert_union(
    text: str, arms: Sequence[Hint], read: Reader
) -> values.Value:
    # The most restrictive types first, those that accept any text last.
    cause = None
    for arm in sorted(arms, key=_permissiveness):
        if arm is values.RequiredFieldValue:
            continue
        try:
            return convert(text, arm, read)
        except NoConversion as error:
            cause = error.cause or cause
    raise NoConversion(cause)


def _permissiveness(hint: Hint) -> tuple[bool, bool, int]:
    is_none = hint is type(None)
    return hint is str, not is_none, _SCALAR_ORDER.get(hint, 9)


def _convert_undeclared(
    text: str, hint: Hint, read: Reader, like: values.Value
) -> values.Value:
    """Converts for a class, function, config or Any: parses the text, or keeps the string."""
    if isinstance(like, str):
        return _to_str(text)
    if isinstance(like, bool):
        return _to_bool(text)
    try:
        value = read(text)
    except ConfigError as error:
        if "(" in text or _expects_object(hint):
            # More than a word: report the parser's error.
            raise NoConversion(error) from None
        return text
    if not fields.matches_type(value, hint, configs=True):
        raise NoConversion
    return value


def _expects_object(hint: Hint) -> bool:
    cls = typing.get_origin(hint) or hint
    if cls in (type, collections.abc.Callable):
        return True
    return isinstance(cls, type) and issubclass(cls, values.ConfigNode)


def _to_bool(text: str) -> bool:
    return _lookup_member(text.lower(), _BOOLS)


def _to_int(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        number = float(text)  # 1e6 steps
        if not number.is_integer():
            raise NoConversion from None
        return int(number)


def _to_str(text: str) -> str:
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1]
    return text


_SCALARS: dict[Hint, Reader] = {
    bool: _to_bool,
    int: _to_int,
    float: float,
    complex: complex,
    str: _to_str,
}
# 1 is a number, not a bool.
_SCALAR_ORDER: dict[Hint, int] = {int: 1, float: 2, complex: 3, bool: 4}
_CONTAINERS: dict[Hint, Callable[[list[values.Value]], values.Value]] = {
    tuple: tuple,
    collections.abc.Sequence: tuple,
    list: list,
    collections.abc.MutableSequence: list,
    set: set,
    collections.abc.Set: set,
    frozenset: frozenset,
}


def _convert_items(
    text: str, cls: Hint, args: tuple[Hint, ...], read: Reader
) -> values.Value:
    item_texts = _split(_strip_brackets(text))
    is_fixed_tuple = cls is tuple and args and args[-1] is not Ellipsis
    if is_fixed_tuple and len(item_texts) != len(args):
        raise NoConversion
    items: list[values.Value] = []
    for i, item_text in enumerate(item_texts):
        hint = Any
        if args:
            hint = args[i] if is_fixed_tuple else args[0]
        items.append(convert(item_text, hint, read))
    return _CONTAINERS[cls](items)


def _split_pairs(text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for item_text in _split(_strip_brackets(text, "{}")):
        parts = _split(item_text, ":")
        if len(parts) != 2:
            raise NoConversion
        key, value = parts
        pairs.append((_to_str(key.strip()), value))
    return pairs


def _strip_brackets(text: str, *brackets: str) -> str:
    text = text.strip()
    for opening, closing in brackets or ("()", "[]", "{}"):
        has_brackets = text.startswith(opening) and text.endswith(closing)
        if has_brackets and _is_bracketed(text):
            return text[1:-1]
    return text


def _is_bracketed(text: str) -> bool:
    """Returns whether the first bracket is closed by the last, unlike in `(1, 2), (3, 4)`."""
    return all(depth > 0 for depth, _ in _bracket_depths(text[:-1]))


def _split(text: str, separator: str = ",") -> list[str]:
    """Splits at separators outside of brackets and quotes, ignoring a trailing one."""
    pieces: list[str] = []
    start = 0
    for i, (depth, char) in enumerate(_bracket_depths(text)):
        if char == separator and depth == 0:
            pieces.append(text[start:i])
            start = i + 1
    last_piece = text[start:]
    if last_piece.strip():
        pieces.append(last_piece)
    return pieces


def _bracket_depths(text: str) -> list[tuple[int, str]]:
    """Returns pairs of bracket depth and character, with "" for characters in quotes."""
    depths: list[tuple[int, str]] = []
    depth = 0
    quote = ""
    for char in text:
        if quote:
            if char == quote:
                quote = ""
            char = ""
        elif char in "'\"":
            quote, char = char, ""
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        depths.append((depth, char))
    return depths


Config = TypeVar("Config", bound=ConfigBase)


def apply_overrides(
    cfg: Config,
    overrides: Iterable[str],
    *,
    allow: Sequence[str] = (),
    source: str = "override",
) -> Config:
    """Sets fields of a config, in path, from strings: all, or none if one is invalid.

    Raises:
        ConfigOverrideError: for a string that is not of the form `path=value`.
        UnknownFieldError: for an unknown path.
        ConfigTypeError: for a value that does not match the declared type.

    >>> from weft.config import config_for_class
    >>> apply_overrides(config_for_class(complex), ["real=1.5"])
    config_for_class(complex)(imag=0, real=1.5)
    """
    overrides = list(overrides)
    # Errors only affect the copy.
    for target in (cfg.clone(), cfg):
        for override in overrides:
            _apply_override(target, override, allow, Origin(source))
    return cfg


def _apply_override(
    cfg: ConfigBase, override: str, allow: Sequence[str], origin: Origin
) -> None:
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ConfigOverrideError(
            f"{override!r} is not an override. Write path=value, such as "
            "learner.learning_rate=3e-4."
        )
    try:
        owner, steps = values.split_path(cfg, path)
    except UnknownFieldError as error:
        raise UnknownFieldError(
            f"{override}: {error}{_suggest_paths(cfg, path)}"
        ) from None
    assert isinstance(owner, ConfigBase)
    hint, like = _declared_type(owner, steps)
    read = functools.partial(read_value, allow=allow, source="")
    try:
        value = convert(text, hint, read, like)
        values.set_path(owner, steps, value)
    except NoConversion as error:
        cause = error.cause
        if cause is None:
            cause = ConfigTypeError(
                f"expected {_type_text(hint, like)}, but got {text!r}."
            )
        raise type(cause)(
            f"{override}: {cause}{_current_value(owner, steps)}"
        ) from None
    except ConfigError as error:
        raise type(error)(
            f"{override}: {error}{_current_value(owner, steps)}"
        ) from None
    owner._origins[steps[0]] = origin


def _declared_type(
    owner: ConfigBase, steps: Sequence[values.Step]
) -> tuple[Hint, values.Value]:
    """Returns the declared type at a path, and an example value for undeclared types."""
    name, *inner_steps = steps
    field = owner._fields()[name]
    hint = field.hint
    example = field.default()
    value = getattr(owner, name)
    for step in inner_steps:
        hint = _child_hint(hint, value, step)
        if isinstance(value, dict):
            value = value.get(step)  # the last step may be a new key
        else:
            value = values.get_path(value, [step])
        example = value
    return hint, example


def _child_hint(hint: Hint, value: values.Value, step: values.Step) -> Hint:
    if values.record_fields(value) is not None:
        return _record_hint(type(value), step)
    is_dict = isinstance(value, dict)
    kind = collections.abc.Mapping if is_dict else collections.abc.Sequence
    for arm in [hint, *typing.get_args(hint)]:
        cls, args = typing.get_origin(arm), typing.get_args(arm)
        if not (isinstance(cls, type) and issubclass(cls, kind) and args):
            continue
        if is_dict:
            return args[-1]
        if len(args) > abs(step) and args[-1] is not Ellipsis:
            return args[step]
        return args[0]
    return Any


def _record_hint(record_type: type, name: str) -> Hint:
    for cls in record_type.__mro__:
        annotation = fields.class_annotations(cls).get(name)
        if annotation is None:
            continue
        namespace = vars(sys.modules[cls.__module__])
        hint = fields.resolve_annotation(annotation, namespace.copy)
        return Any if hint is None else hint
    return Any


def _type_text(hint: Hint, like: values.Value) -> str:
    if hint is Any and like is not None and like is not values.REQUIRED:
        hint = type(like)
    return fields.type_name(hint)


def _current_value(owner: ConfigBase, steps: Sequence[values.Step]) -> str:
    try:
        value = values.get_path(owner, steps)
    except UnknownFieldError:
        return ""
    if fields.is_instantiable(value):
        shown_value = value._label()
    else:
        shown_value = value_text(value)[:80]
    origin = owner._origins.get(steps[0])
    reason = f"set at {origin}" if origin else "by default"
    return f" It is {shown_value}, {reason}."


def _suggest_paths(cfg: ConfigBase, path: str) -> str:
    """Returns a sentence with the paths that end in the same name, exact ones first."""
    name = path.rpartition(".")[2]
    # Dicts, as sets that keep the order.
    exact: dict[str, None] = {}
    longer: dict[str, None] = {}
    for leaf in values.to_flat_dict(cfg, omit_default_values=()):
        parts = leaf.split(".")
        for end, part in enumerate(parts, 1):
            if part == name:
                exact[".".join(parts[:end])] = None
            elif part.endswith((f"_{name}", f"_{name.removesuffix('s')}")):
                longer[".".join(parts[:end])] = None
    similar = [*sorted(exact, key=len), *sorted(longer, key=len)]
    if not similar:
        return ""
    return f" There is {' and '.join(similar[:4])}."
