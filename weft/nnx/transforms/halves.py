"""The static half of a call's objects, and their state inside the call.

A group of an object's state maps the number of a value in the call to the variable or array. Extra
data of a value is at `~number`: the first value of a new variable, or a key count at the time when
the last variable was made.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from weft.lifting.functions import Same
from weft.nnx.filters import Everything, OfType, Path, Predicate, to_predicate
from weft.nnx.graph import Flat, GraphDef, NodeDef, VariableDef
from weft.nnx.pytree import Pytree
from weft.nnx.recording import Recording
from weft.nnx.structure import Copies
from weft.nnx.transforms.calls import unmatched
from weft.nnx.transforms.growth import Described
from weft.nnx.variables import Variable

Group = dict[int, Any]
Groups = tuple[Group, ...]
Wanted = tuple[tuple[Any, Any], ...]


class Static(NamedTuple):
    """The static half of a call's objects.

    Attributes:
        graphdef: describes the pair of the objects and no results, without metadata.
        places: the object and its group of each value.
        owners: for each value that is not a variable, the index of its object and its attribute.
        is_sure: whether all values are variables, and no static value is mutable.
        changing: mutable static values, compared by identity as well, since a program would
            otherwise serve another object of equal value with the changes of the first one.
        records: whether an enclosing loop or branch needs the first values of new variables.
        origins: if a loop's body made objects, for each the caller's one, None for a new one.
    """

    graphdef: GraphDef
    places: tuple[tuple[int, int], ...]
    owners: tuple[tuple[int, Hashable] | None, ...]
    is_sure: bool
    changing: tuple[Same, ...]
    numbers: Sequence[int]
    records: bool
    origins: tuple[int | None, ...] | None = None

    def path_of(self, number: int) -> Path | None:
        """Returns the path of an input value."""
        if self.origins is None:
            return self.graphdef.paths[number] if number < len(self.numbers) else None
        return dict(zip(self.numbers, self.graphdef.paths, strict=True)).get(number)

    def unchanged(self) -> "Changed | None":
        if self.origins is None:
            return None
        return Changed(self.graphdef, self.origins, tuple(self.numbers), None)


class Changed(NamedTuple):
    """The graph after a call, of the input objects and of the results.

    Attributes:
        origins: for each object the index of the input one, None for a new one.
        keys: for each value the number of the input one, or a number after those.
        copies: copies of new `unhashable_values`, for each caller; None if no static value or
            metadata is mutable.
        before: if a loop's body made objects, the static half for the body that finds them.
    """

    graphdef: GraphDef
    origins: tuple[int | None, ...]
    keys: tuple[int, ...]
    copies: Copies | None
    before: Static | None = None


class Inner(NamedTuple):
    """The objects inside a call, with their initial values.

    `looks` are the initial parts of each object, if they show all changes.
    """

    objects: list[Any]
    values: list[Any]
    metadata: list[Any]
    looks: list[tuple[Pytree, list[Any]]] | None
    recording: Recording | None

    def looks_the_same(self) -> bool:
        """Returns whether only values and metadata of variables can have changed."""
        return self.looks is not None and all(are_same(x._look(), look) for x, look in self.looks)


class Grouping:
    """The groups of values, and the roles of these groups."""

    def __init__(self, of_args: Sequence[Wanted], of_results: Sequence[Wanted]):
        self._wanted = of_args, of_results
        self._predicates: Any = [
            [[to_predicate(where) for where, _ in of_object] for of_object in of_part]
            for of_part in self._wanted
        ]

    def wanted(self, i: int, g: int) -> tuple[Any, Any]:
        return self._wanted[0][i][g]

    def place(self, path: Path, leaf: Any) -> tuple[int, int, int]:
        """Returns 0 for an argument or 1 for a result, and the indices of the object and group.

        Raises:
            StateFilterError: if no filter matches.
        """
        part, i = path[:2]
        predicates: list[Predicate] = self._predicates[part][i]  # pyright: ignore[reportCallIssue, reportArgumentType]
        below = path[2:]
        for g, matches in enumerate(predicates):
            if type(matches) is Everything or matches(below, leaf):
                return part, i, g  # pyright: ignore[reportReturnType]
        raise unmatched(leaf, path, [where for where, _ in self._wanted[part][i]])  # pyright: ignore[reportCallIssue, reportArgumentType]

    @property
    def is_of_structure(self) -> bool:
        """True if equal graph descriptions always have the same groups."""
        every = (matches for part in self._predicates for of in part for matches in of)
        return all(isinstance(matches, Everything | OfType) for matches in every)

    def role(self, path: Path, leaf: Any) -> Any:
        part, i, g = self.place(path, leaf)
        return self._wanted[part][i][g][1]

    def roles(self, path: Path) -> list[Any]:
        part, i = path[:2]
        return [role for _, role in self._wanted[part][i]]  # pyright: ignore[reportCallIssue, reportArgumentType]

    def is_own(self, after: Flat, path: Path) -> bool:
        at = zip(after.graphdef.paths, after.leaves, strict=True)
        roles = [self.role(p, leaf) for p, leaf in at if p[: len(path)] == path]
        return all(isinstance(role, int) for role in roles or self.roles(path))

    def is_same(self, path: Path, other: Path) -> bool:
        of_path, of_other = (self._wanted[p[0]][p[1]] for p in (path, other))  # pyright: ignore[reportCallIssue, reportArgumentType]
        return len(of_path) == 1 and of_path == of_other


def values_of(
    static: Static, objects: Iterable[Any], leaves: Sequence[Any]
) -> Iterator[tuple[Variable[Any] | None, Any]]:
    """Yields each value with its variable, or None for an attribute."""
    variables = (x for x in objects if isinstance(x, Variable))
    for leaf, owner in zip(leaves, static.owners, strict=True):
        yield (next(variables) if owner is None else None), leaf


def known_numbers(inner: Inner, static: Static) -> dict[Any, int]:
    """Returns the numbers of the input values, by variable, or by owner and attribute."""
    known: dict[Any, int] = {}
    for n, (variable, _) in enumerate(values_of(static, inner.objects, inner.values)):
        owner = static.owners[n]
        known[id(variable) if owner is None else (id(inner.objects[owner[0]]), owner[1])] = n
    return known


def described(static: Static, changed: Changed | None) -> Described:
    """Returns the graph after a branch, or the input graph."""
    if changed is not None:
        return Described(changed.graphdef, changed.origins, changed.keys)
    return Described(static.graphdef, range(len(first_paths(static.graphdef))), static.numbers)


def are_same(xs: list[Any], ys: list[Any]) -> bool:
    """Returns whether two lists hold the same objects."""
    return len(xs) == len(ys) and all(map(operator.is_, xs, ys))


def is_changed(leaf: Any, inner: Inner, n: int) -> bool:
    """Returns whether a value, or a variable's metadata, differs from its initial one."""
    before, now = inner.values[n], leaf
    if isinstance(leaf, Variable):
        now = leaf._value
        if leaf._metadata is not inner.metadata[n]:
            return True
    if now is before:
        return False
    old, new = jax.tree.leaves(before), jax.tree.leaves(now)
    return (
        len(old) != len(new)
        or any(a is not b for a, b in zip(old, new, strict=True))
        or jax.tree.structure(before) != jax.tree.structure(now)
    )


def first_paths(graphdef: GraphDef) -> dict[int, Path]:
    """Returns the first path of each object."""
    paths: dict[int, Path] = {}

    def walk(part: Any, path: Path) -> None:
        if isinstance(part, VariableDef):
            paths[part.index] = path
        elif isinstance(part, NodeDef):
            if part.index is not None:
                paths[part.index] = path
            for name, below in part.attributes:
                walk(below, (*path, name))

    walk(graphdef.root, ())
    return paths
