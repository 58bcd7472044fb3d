"""Overrides of config fields, as strings from a command line.

    apply_overrides(cfg, ["learner.optimizer.learning_rate=3e-4", "model.layers[2].rate=0.1"])

The declared type determines how a string is read: `1e-3` is a float for a float field and a string
for a string field. The arms of a union are tried with `str` last. Unambiguous brackets and quotes
are optional: `data,model`, `('data', 'model')` and `[data, model]` are the same tuple.
"""

import collections.abc
import enum
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from weft.config import fields, values
from weft.config.config import ConfigBase, Origin
from weft.config.text_parser import read_value
from weft.config.text_writer import value_text
from weft.errors import ConfigError, ConfigOverrideError, ConfigTypeError, UnknownFieldError

_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class NoConversion(Exception):
    """Signal that a string is not a value of the type; the caller adds the path.

    `cause` is the error of the parser, if the string looks like the text of a value.
    """

    def __init__(self, cause: ConfigError | None = None):
        super().__init__(cause)
        self.cause = cause


def convert(text: str, hint: object, read: Callable[[str], Any], like: object = None) -> Any:
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
        return _lookup_member(
            text, {str(arg): arg for arg in args} | {repr(arg): arg for arg in args}
        )
    cls = origin or hint
    if cls in _SCALARS:
        try:
            return _SCALARS[cls](text)
        except ValueError:
            raise NoConversion from None
    if isinstance(cls, type) and issubclass(cls, enum.Enum):
        by_value = {str(member.value): member for member in cls}
        return _lookup_member(text.rpartition(".")[2], by_value | dict(cls.__members__))
    if cls in _CONTAINERS:
        return _convert_items(text, cls, args, read)
    if cls in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        key, value = args if len(args) == 2 else (Any, Any)
        return {convert(k, key, read): convert(v, value, read) for k, v in _split_pairs(text)}
    if isinstance(hint, typing.NewType):
        return convert(text, hint.__supertype__, read, like)
    return _convert_undeclared(text, hint, read, like)


def _lookup_member(text: str, members: dict[str, Any]) -> Any:
    if text not in members:
        raise NoConversion
    return members[text]


def _convert_union(text: str, arms: Sequence[Any], read: Callable[[str], Any]) -> Any:
    # The most restrictive types first, those that accept any text last.
    ranked = sorted(
        (arm for arm in arms if arm is not values.RequiredFieldValue),
        key=lambda arm: (arm is str, arm is not type(None), _SCALAR_ORDER.get(arm, 9)),
    )
    cause = None
    for arm in ranked:
        try:
            return convert(text, arm, read)
        except NoConversion as error:
            cause = error.cause or cause
    raise NoConversion(cause)


def _convert_undeclared(text: str, hint: object, read: Callable[[str], Any], like: object) -> Any:
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


def _expects_object(hint: object) -> bool:
    cls = typing.get_origin(hint) or hint
    return isinstance(cls, type) and (
        issubclass(cls, values.ConfigNode) or cls in (type, collections.abc.Callable)
    )


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


_SCALARS: dict[Any, Callable[[str], Any]] = {
    bool: _to_bool,
    int: _to_int,
    float: float,
    complex: complex,
    str: _to_str,
}
_SCALAR_ORDER = {int: 1, float: 2, complex: 3, bool: 4}  # 1 is a number, not a bool
_CONTAINERS: dict[Any, Callable[[list], Any]] = {
    tuple: tuple,
    collections.abc.Sequence: tuple,
    list: list,
    collections.abc.MutableSequence: list,
    set: set,
    collections.abc.Set: set,
    frozenset: frozenset,
}


def _convert_items(text: str, cls: Any, args: tuple, read: Callable[[str], Any]) -> Any:
    items = _split(_strip_brackets(text))
    if cls is tuple and args and args[-1] is not Ellipsis:
        if len(items) != len(args):
            raise NoConversion
        hints = args
    else:
        hints = [args[0] if args else Any] * len(items)
    converted = [convert(item, hint, read) for item, hint in zip(items, hints, strict=True)]
    return _CONTAINERS[cls](converted)


def _split_pairs(text: str) -> list[tuple[str, str]]:
    pairs = [_split(item, ":") for item in _split(_strip_brackets(text, "{}"))]
    if any(len(pair) != 2 for pair in pairs):
        raise NoConversion
    return [(_to_str(key.strip()), value) for key, value in pairs]


def _strip_brackets(text: str, *brackets: str) -> str:
    text = text.strip()
    for opening, closing in brackets or ("()", "[]", "{}"):
        if text.startswith(opening) and text.endswith(closing) and _is_bracketed(text):
            return text[1:-1]
    return text


def _is_bracketed(text: str) -> bool:
    """Returns whether the first bracket is closed by the last, unlike in `(1, 2), (3, 4)`."""
    return all(depth > 0 for depth, _ in _bracket_depths(text[:-1]))


def _split(text: str, separator: str = ",") -> list[str]:
    """Splits at separators outside of brackets and quotes, ignoring a trailing one."""
    pieces, start = [], 0
    for i, (depth, char) in enumerate(_bracket_depths(text)):
        if char == separator and depth == 0:
            pieces.append(text[start:i])
            start = i + 1
    pieces.append(text[start:])
    return pieces if pieces[-1].strip() else pieces[:-1]


def _bracket_depths(text: str) -> list[tuple[int, str]]:
    """Returns pairs of bracket depth and character, with "" for characters in quotes."""
    result, depth, quote = [], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
            char = ""
        elif char in "'\"":
            quote, char = char, ""
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        result.append((depth, char))
    return result


Config = TypeVar("Config", bound=ConfigBase)


def apply_overrides(
    cfg: Config, overrides: Iterable[str], *, allow: Sequence[str] = (), source: str = "override"
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


def _apply_override(cfg: ConfigBase, override: str, allow: Sequence[str], origin: Origin) -> None:
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
        raise UnknownFieldError(f"{override}: {error}{_suggest_paths(cfg, path)}") from None
    assert isinstance(owner, ConfigBase)
    hint, like = _declared_type(owner, steps)
    try:
        value = convert(text, hint, lambda t: read_value(t, allow=allow, source=""), like)
        values.set_path(owner, steps, value)
    except NoConversion as error:
        kind = type(error.cause) if error.cause else ConfigTypeError
        expected = error.cause or f"expected {_type_text(hint, like)}, but got {text!r}."
        raise kind(f"{override}: {expected}{_current_value(owner, steps)}") from None
    except ConfigError as error:
        raise type(error)(f"{override}: {error}{_current_value(owner, steps)}") from None
    owner._origins[steps[0]] = origin


def _declared_type(owner: ConfigBase, steps: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the declared type at a path, and an example value for undeclared types."""
    field = owner._fields()[steps[0]]
    hint, value, like = field.hint, getattr(owner, steps[0]), field.default()
    for step in steps[1:]:
        hint = _child_hint(hint, value, step)
        value = values.get_path(value, [step]) if not isinstance(value, dict) else value.get(step)
        like = value
    return hint, like


def _child_hint(hint: Any, value: Any, step: Any) -> Any:
    if values.record_fields(value) is not None:
        for cls in type(value).__mro__:
            annotation = fields.class_annotations(cls).get(step)
            if annotation is not None:
                resolved = fields.resolve_annotation(
                    annotation, vars(sys.modules[cls.__module__]).copy
                )
                return Any if resolved is None else resolved
        return Any
    kind = collections.abc.Mapping if isinstance(value, dict) else collections.abc.Sequence
    for arm in [hint, *typing.get_args(hint)]:
        cls, args = typing.get_origin(arm), typing.get_args(arm)
        if isinstance(cls, type) and issubclass(cls, kind) and args:
            if isinstance(value, dict):
                return args[-1]
            return args[step] if len(args) > abs(step) and args[-1] is not Ellipsis else args[0]
    return Any


def _type_text(hint: object, like: object) -> str:
    if hint is Any and like is not None and not isinstance(like, values.RequiredFieldValue):
        return fields.type_name(type(like))
    return fields.type_name(hint)


def _current_value(owner: ConfigBase, steps: Sequence[Any]) -> str:
    try:
        value = values.get_path(owner, steps)
    except UnknownFieldError:
        return ""
    shown = value._label() if fields.is_instantiable(value) else f"{value_text(value):.80}"
    origin = owner._origins.get(steps[0])
    return f" It is {shown}, {f'set at {origin}' if origin else 'by default'}."


def _suggest_paths(cfg: ConfigBase, path: str) -> str:
    """Returns a sentence with the paths that end in the same name, exact ones first."""
    name = path.rpartition(".")[2]
    exact, longer = dict[str, None](), dict[str, None]()
    for leaf in values.to_flat_dict(cfg, omit_default_values=()):
        parts = leaf.split(".")
        for end, part in enumerate(parts, 1):
            if part == name:
                exact[".".join(parts[:end])] = None
            elif part.endswith((f"_{name}", f"_{name.removesuffix('s')}")):
                longer[".".join(parts[:end])] = None
    similar = [*sorted(exact, key=len), *sorted(longer, key=len)]
    return f" There is {' and '.join(similar[:4])}." if similar else ""
