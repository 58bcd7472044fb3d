"""The two halves of the objects of a call: what is no array, and what is found inside.

A group of an object's state maps the number of a value among all of the call's to the variable or
array itself. What more is known of a value is at `~number`: for a new variable its first value, for
a count of keys what it was when the last variable was made.
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
    """What of the objects of a call is no array.

    Attributes:
        graphdef: of the pair of these objects and no results, without metadata.
        places: for each value, the object among them and the group of it that it is in.
        owners: for a value that is no variable whose attribute it is, by index.
        is_sure: whether all values are variables, and nothing else can change within itself.
        changing: what is static and can change within itself, compared by identity as well. A
            program would otherwise serve another object of the same value, and find there what the
            first one has become since.
        numbers: of the values.
        records: whether the first values of new variables are wanted, since a loop or a branch is
            around.
        origins: where a loop's body has made objects, for each the caller's one, None for a new
            one.
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
        """Where a value is that went in."""
        if self.origins is None:
            return self.graphdef.paths[number] if number < len(self.numbers) else None
        return dict(zip(self.numbers, self.graphdef.paths, strict=True)).get(number)

    def unchanged(self) -> "Changed | None":
        """What comes back if nothing but values has changed."""
        if self.origins is None:
            return None
        return Changed(self.graphdef, self.origins, tuple(self.numbers), None)


class Changed(NamedTuple):
    """What has become of the graph.

    Attributes:
        graphdef: of the pair of the objects that went in and of the results.
        origins: for each object in it the index of the one that went in, None for a new one.
        keys: for each value in it the number of the one that went in, or a number after those.
        copies: of its `unhashable_values`, for each caller, without those that went in. None where
            nothing static can change, also in metadata.
        before: where a loop's body has made objects, the static half for the body that finds them.
    """

    graphdef: GraphDef
    origins: tuple[int | None, ...]
    keys: tuple[int, ...]
    copies: Copies | None
    before: Static | None = None


class Inner(NamedTuple):
    """The objects inside, and what their values were at first.

    Attributes:
        looks: what each object was made of, if that tells whether it has changed.
        recording: of what the function makes, in a loop or a branch.
    """

    objects: list[Any]
    values: list[Any]
    metadata: list[Any]
    looks: list[tuple[Pytree, list[Any]]] | None
    recording: Recording | None

    def looks_the_same(self) -> bool:
        """Whether nothing but values and metadata of variables can have changed."""
        return self.looks is not None and all(are_same(x._look(), look) for x, look in self.looks)


class Grouping:
    """To which group of which object a value belongs, and what was said of that group."""

    def __init__(self, of_args: Sequence[Wanted], of_results: Sequence[Wanted]):
        self._wanted = of_args, of_results
        self._predicates: Any = [
            [[to_predicate(where) for where, _ in of_object] for of_object in of_part]
            for of_part in self._wanted
        ]

    def wanted(self, i: int, g: int) -> tuple[Any, Any]:
        """The filter and the role of a group of an argument."""
        return self._wanted[0][i][g]

    def place(self, path: Path, leaf: Any) -> tuple[int, int, int]:
        """Whether it is among the arguments or results, which of the objects there, which group.

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
        """Whether it is the same for all graphs with the same description."""
        every = (matches for part in self._predicates for of in part for matches in of)
        return all(isinstance(matches, Everything | OfType) for matches in every)

    def role(self, path: Path, leaf: Any) -> Any:
        """What was said of a value."""
        part, i, g = self.place(path, leaf)
        return self._wanted[part][i][g][1]

    def roles(self, path: Path) -> list[Any]:
        """All roles that were given to the object there."""
        part, i = path[:2]
        return [role for _, role in self._wanted[part][i]]  # pyright: ignore[reportCallIssue, reportArgumentType]

    def is_own(self, after: Flat, path: Path) -> bool:
        """Whether each iteration has its own of all values there, or of the whole object."""
        at = zip(after.graphdef.paths, after.leaves, strict=True)
        roles = [self.role(p, leaf) for p, leaf in at if p[: len(path)] == path]
        return all(isinstance(role, int) for role in roles or self.roles(path))

    def is_same(self, path: Path, other: Path) -> bool:
        """Whether the same one thing is said of all that is below either path."""
        of_path, of_other = (self._wanted[p[0]][p[1]] for p in (path, other))  # pyright: ignore[reportCallIssue, reportArgumentType]
        return len(of_path) == 1 and of_path == of_other


def values_of(
    static: Static, objects: Iterable[Any], leaves: Sequence[Any]
) -> Iterator[tuple[Variable[Any] | None, Any]]:
    """Each value with its variable, if it is in one."""
    variables = (x for x in objects if isinstance(x, Variable))
    for leaf, owner in zip(leaves, static.owners, strict=True):
        yield (next(variables) if owner is None else None), leaf


def known_numbers(inner: Inner, static: Static) -> dict[Any, int]:
    """The numbers of the values that went in, by variable, or by owner and attribute."""
    known: dict[Any, int] = {}
    for n, (variable, _) in enumerate(values_of(static, inner.objects, inner.values)):
        owner = static.owners[n]
        known[id(variable) if owner is None else (id(inner.objects[owner[0]]), owner[1])] = n
    return known


def described(static: Static, changed: Changed | None) -> Described:
    """The graph that a branch leaves, or the one that went in."""
    if changed is not None:
        return Described(changed.graphdef, changed.origins, changed.keys)
    return Described(static.graphdef, range(len(first_paths(static.graphdef))), static.numbers)


def are_same(xs: list[Any], ys: list[Any]) -> bool:
    """Whether two lists have the same objects."""
    return len(xs) == len(ys) and all(map(operator.is_, xs, ys))


def is_changed(leaf: Any, inner: Inner, n: int) -> bool:
    """Whether a value, or a variable's metadata, is another than it was at first."""
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
    """Where each object was met first."""
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
