"""Conversion of command-line strings to values of a declared type.

`1e-3` is a float for a float field and a string for a string field. The arms of a union are tried
with `str` last. Unambiguous brackets and quotes are optional: `data,model`, `('data', 'model')` and
`[data, model]` are the same tuple.
"""

import collections.abc
import enum
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from weft.config.required import REQUIRED, RequiredFieldValue
from weft.config.typecheck import fits
from weft.config.values import ConfigNode
from weft.errors import ConfigError

_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class NoConversion(Exception):
    """Signal that a string is not a value of the type; the caller adds the path.

    Args:
        cause: error of the parser, if the string looks like the text of a value.
    """

    def __init__(self, cause: ConfigError | None = None):
        super().__init__(cause)
        self.cause = cause


def convert(text: str, hint: Any, read: Callable[[str], Any], like: Any = None) -> Any:
    """Converts a string to a value.

    Args:
        read: parses the text of a value, for classes, functions and configs.
        like: a value of the field, such as its default, which determines an undeclared type.

    Raises:
        NoConversion: if the string is not a value of that type.

    >>> convert("1e-3", float, eval), convert("a,b", tuple[str, ...], eval)
    (0.001, ('a', 'b'))
    """
    text = text.strip()
    if text == "REQUIRED":
        return REQUIRED
    if hint is None or hint is type(None):
        return _member(text.lower(), {"none": None, "null": None})
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Annotated, typing.Final):
        return convert(text, args[0], read, like)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(text, args, read)
    if origin is typing.Literal:
        return _member(text, {str(arg): arg for arg in args} | {repr(arg): arg for arg in args})
    cls = origin or hint
    if cls in _SCALARS:
        return _SCALARS[cls](text)
    if isinstance(cls, type) and issubclass(cls, enum.Enum):
        by_value = {str(member.value): member for member in cls}
        return _member(text.rpartition(".")[2], by_value | dict(cls.__members__))
    if cls in _CONTAINERS:
        return _convert_items(text, _CONTAINERS[cls], cls, args, read)
    if cls in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        key, value = args if len(args) == 2 else (Any, Any)
        return {convert(k, key, read): convert(v, value, read) for k, v in _split_pairs(text)}
    if isinstance(hint, typing.NewType):
        return convert(text, hint.__supertype__, read, like)
    return _convert_undeclared(text, hint, read, like)


def _member(text: str, members: dict[str, Any]) -> Any:
    if text not in members:
        raise NoConversion
    return members[text]


def _convert_union(text: str, arms: Sequence[Any], read: Callable[[str], Any]) -> Any:
    # The most restrictive types first, those that accept any text last.
    ranked = sorted(
        (arm for arm in arms if arm is not RequiredFieldValue),
        key=lambda arm: (arm is str, arm is not type(None), _SCALAR_ORDER.get(arm, 9)),
    )
    cause = None
    for arm in ranked:
        try:
            return convert(text, arm, read)
        except NoConversion as error:
            cause = error.cause or cause
    raise NoConversion(cause)


def _convert_undeclared(text: str, hint: Any, read: Callable[[str], Any], like: Any) -> Any:
    """Converts for a class, function, config or Any: parses the text, or keeps the string."""
    if isinstance(like, str):
        return _to_str(text)
    if isinstance(like, bool):
        return _to_bool(text)
    try:
        value = read(text)
    except ConfigError as error:
        if "(" in text or _wants_object(hint):
            # More than a word: report the parser's error.
            raise NoConversion(error) from None
        return text
    if not fits(value, hint, configs=True):
        raise NoConversion
    return value


def _wants_object(hint: Any) -> bool:
    cls = typing.get_origin(hint) or hint
    return isinstance(cls, type) and (
        issubclass(cls, ConfigNode) or cls in (type, collections.abc.Callable)
    )


def _to_bool(text: str) -> bool:
    return _member(text.lower(), _BOOLS)


def _to_int(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        number = _to_float(text)  # 1e6 steps
        if not number.is_integer():
            raise NoConversion from None
        return int(number)


def _to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise NoConversion from None


def _to_complex(text: str) -> complex:
    try:
        return complex(text)
    except ValueError:
        raise NoConversion from None


def _to_str(text: str) -> str:
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1]
    return text


_SCALARS: dict[Any, Callable[[str], Any]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    complex: _to_complex,
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


def _convert_items(
    text: str, make: Callable[[list], Any], cls: Any, args: tuple, read: Callable[[str], Any]
) -> Any:
    items = _split(_unwrapped(text))
    if cls is tuple and args and args[-1] is not Ellipsis:
        if len(items) != len(args):
            raise NoConversion
        hints = args
    else:
        hints = [args[0] if args else Any] * len(items)
    return make([convert(item, hint, read) for item, hint in zip(items, hints, strict=True)])


def _split_pairs(text: str) -> list[tuple[str, str]]:
    pairs = [_split(item, ":") for item in _split(_unwrapped(text, "{}"))]
    if any(len(pair) != 2 for pair in pairs):
        raise NoConversion
    return [(_to_str(key.strip()), value) for key, value in pairs]


def _unwrapped(text: str, *brackets: str) -> str:
    text = text.strip()
    for opening, closing in brackets or ("()", "[]", "{}"):
        if text.startswith(opening) and text.endswith(closing) and _is_one_group(text):
            return text[1:-1]
    return text


def _is_one_group(text: str) -> bool:
    """Returns whether the first bracket is closed by the last, unlike in `(1, 2), (3, 4)`."""
    return all(depth > 0 for depth, _ in _depths(text[:-1]))


def _split(text: str, separator: str = ",") -> list[str]:
    """Splits at separators outside of brackets and quotes, ignoring a trailing one."""
    pieces, start = [], 0
    for i, (depth, char) in enumerate(_depths(text)):
        if char == separator and depth == 0:
            pieces.append(text[start:i])
            start = i + 1
    pieces.append(text[start:])
    return pieces if pieces[-1].strip() else pieces[:-1]


def _depths(text: str) -> list[tuple[int, str]]:
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
