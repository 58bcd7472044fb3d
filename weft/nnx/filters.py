"""Filters of variables and other leaves, by type, tag, path or function.

A filter is a type (variables of that type, or leaves that are instances), a string (a tag), a path,
a function of path and value, `...` or True (everything), None or False (nothing), or a list of
alternative filters. `Not`, `All` and `Any` combine them.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import EllipsisType
from typing import Any as AnyValue
from typing import NamedTuple

from weft.errors import StateFilterError

Path = tuple[Hashable, ...]
Item = tuple[Path, AnyValue]
Predicate = Callable[[Path, AnyValue], bool]
FilterLiteral = type | str | Path | Predicate | bool | EllipsisType | None
Filter = FilterLiteral | Sequence[FilterLiteral]


@dataclasses.dataclass(frozen=True)
class OfType:
    """Filter of variables of a type, and other leaves that are instances of it."""

    type: type

    def __call__(self, path: Path, x: AnyValue) -> bool:
        if isinstance(x, self.type):
            return True
        # A `VariableDef`, a variable without its value, has its type.
        variable_type = getattr(x, "type", None)
        return isinstance(variable_type, type) and issubclass(
            variable_type, self.type
        )


@dataclasses.dataclass(frozen=True)
class WithTag:
    """Filter of variables with a tag: `nnx.Param(value, tag="head")`."""

    tag: str

    def __call__(self, path: Path, x: AnyValue) -> bool:
        if hasattr(x, "get_metadata"):
            return x.get_metadata("tag", None) == self.tag
        # A PRNG stream, which is not a variable, has a tag as well.
        return getattr(x, "tag", None) == self.tag


@dataclasses.dataclass(frozen=True)
class PathIn:
    """Filter that matches the values at certain paths."""

    paths: frozenset[Path]

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return path in self.paths


@dataclasses.dataclass(frozen=True)
class PathContains:
    """Filter of paths that contain a name.

    Attributes:
        exact: whether a part of the path must equal it; otherwise a part must contain it.
    """

    key: Hashable
    exact: bool = True

    def __call__(self, path: Path, x: AnyValue) -> bool:
        if self.exact:
            return self.key in path
        name = str(self.key)
        return any(name in str(part) for part in path)


@dataclasses.dataclass(frozen=True)
class Everything:
    """Filter that matches everything."""

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class Nothing:
    """Filter that matches nothing."""

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return False


@dataclasses.dataclass(init=False, repr=False, unsafe_hash=True)
class _Combined:
    predicates: tuple[Predicate, ...]

    def __init__(self, *filters: Filter):
        self.predicates = tuple(map(to_predicate, filters))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.predicates))})"


class Any(_Combined):
    """Filter that matches if one of its filters matches."""

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return any(matches(path, x) for matches in self.predicates)


class All(_Combined):
    """Filter that matches if all its filters match."""

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return all(matches(path, x) for matches in self.predicates)


class Not(_Combined):
    """Filter that matches if its filter does not."""

    def __init__(self, collection_filter: Filter, /):
        super().__init__(collection_filter)

    def __setstate__(self, state: dict[str, AnyValue]) -> None:
        # That of Flax has `predicate`.
        self.predicates = state.get("predicates") or (state["predicate"],)

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return not self.predicates[0](path, x)


def to_predicate(filter_like: Filter) -> Predicate:
    """Returns a filter as a function of path and value.

    Raises StateFilterError if it is not a filter.

    >>> to_predicate(nnx.Param)(("kernel",), nnx.Param(1.0))
    True
    """
    if filter_like is ... or filter_like is True:
        return Everything()
    if filter_like is None or filter_like is False:
        return Nothing()
    if isinstance(filter_like, str):
        return WithTag(filter_like)
    if isinstance(filter_like, type):
        return OfType(filter_like)
    if callable(filter_like):
        return filter_like
    if isinstance(filter_like, list | tuple | set | frozenset):
        return Any(*filter_like)  # pyright: ignore[reportArgumentType]
    raise StateFilterError(
        f"{filter_like!r} is not a filter; a filter is a type of variables, a tag (a string), a "
        "function of path and value, `...`, True, False, None, or a list of filters."
    )


def predicates(filters: Sequence[Filter]) -> tuple[Predicate, ...]:
    """Returns filters as predicates; `...` must come last.

    Raises StateFilterError if a filter follows one that matches everything.
    """
    for i, filter_like in enumerate(filters):
        later_filters = filters[i + 1 :]
        if _is_everything(filter_like) and not all(
            map(_is_everything, later_filters)
        ):
            raise StateFilterError(
                f"{filter_like!r} matches everything, but {later_filters!r} comes after it; put "
                "it last."
            )
    return tuple(map(to_predicate, filters))


def _is_everything(filter_like: Filter) -> bool:
    return filter_like is ... or filter_like is True


def _literal_text(filter_like: Filter) -> str:
    match filter_like:
        case OfType(type=cls):
            return cls.__name__
        case type():
            return filter_like.__name__
        case WithTag(tag=tag):
            return repr(tag)
        case Everything():
            return "..."
    return "..." if filter_like is ... else repr(filter_like)


def filters_text(filters: Sequence[Filter]) -> str:
    """Returns the text of filters, as users write them.

    >>> filters_text([nnx.Param, "lora", ...])
    "Param, 'lora', ..."
    """
    return ", ".join(map(_literal_text, filters))


class Grouped(NamedTuple):
    """Items by the first filter that matches them, and those that none matches."""

    groups: list[list[Item]]
    unmatched: list[Item]


def grouped(items: Iterable[Item], filters: Sequence[Filter]) -> Grouped:
    """Groups items by the first matching filter."""
    matching = predicates(filters)
    groups: list[list[Item]] = [[] for _ in matching]
    unmatched: list[Item] = []
    for item in items:
        path, value = item
        for group, matches in zip(groups, matching, strict=True):
            if matches(path, value):
                group.append(item)
                break
        else:
            unmatched.append(item)
    return Grouped(groups, unmatched)
