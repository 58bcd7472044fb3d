"""Filters of variables and other leaves, by type, tag, path or function.

A filter is a type (variables of that type, or leaves that are instances), a string (a tag), a path,
a function of path and value, `...` or True (everything), None or False (nothing), or a list of
alternative filters. `Not`, `All` and `Any` combine them.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import EllipsisType
from typing import Any as AnyValue

from weft.errors import StateFilterError

Path = tuple[Hashable, ...]
Predicate = Callable[[Path, AnyValue], bool]
FilterLiteral = type | str | Path | Predicate | bool | EllipsisType | None
Filter = FilterLiteral | Sequence[FilterLiteral]


@dataclasses.dataclass(frozen=True)
class OfType:
    """Filter of variables of a type, and other leaves that are instances of it."""

    type: type

    def __call__(self, path: Path, x: AnyValue) -> bool:
        return isinstance(x, self.type) or (
            isinstance(getattr(x, "type", None), type) and issubclass(x.type, self.type)
        )


@dataclasses.dataclass(frozen=True)
class WithTag:
    """Filter of variables with a tag: `nnx.Param(value, tag="head")`."""

    tag: str

    def __call__(self, path: Path, x: AnyValue) -> bool:
        # A PRNG stream, which is not a variable, has a tag as well.
        is_variable = hasattr(x, "get_metadata")
        tag = x.get_metadata("tag", None) if is_variable else getattr(x, "tag", None)
        return tag == self.tag


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
        return any(str(self.key) in str(part) for part in path)


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
        self.predicates = tuple(to_predicate(f) for f in filters)

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
    is_all = [filter_like is ... or filter_like is True for filter_like in filters]
    for i, filter_like in enumerate(filters):
        if is_all[i] and not all(is_all[i + 1 :]):
            raise StateFilterError(
                f"{filter_like!r} matches everything, but {filters[i + 1 :]!r} comes after it; put "
                "it last."
            )
    return tuple(to_predicate(f) for f in filters)


def _literal(where: AnyValue) -> AnyValue:
    match where:
        case OfType():
            return where.type
        case WithTag():
            return where.tag
        case Everything():
            return ...
    return where


def filters_text(filters: Sequence[Filter]) -> str:
    """Returns the text of filters, as users write them.

    >>> filters_text([nnx.Param, "lora", ...])
    "Param, 'lora', ..."
    """
    plain = [_literal(f) for f in filters]
    return ", ".join(
        "..." if f is ... else f.__name__ if isinstance(f, type) else repr(f) for f in plain
    )


def grouped(
    items: Iterable[tuple[Path, AnyValue]], filters: Sequence[Filter]
) -> tuple[list[list[tuple[Path, AnyValue]]], list[tuple[Path, AnyValue]]]:
    """Groups items by the first matching filter; returns the groups and the unmatched items."""
    matching = predicates(filters)
    groups: list[list[tuple[Path, AnyValue]]] = [[] for _ in matching]
    rest = []
    for path, value in items:
        for group, matches in zip(groups, matching, strict=True):
            if matches(path, value):
                group.append((path, value))
                break
        else:
            rest.append((path, value))
    return groups, rest
