"""Graph changes in the bodies of loops and branches.

A loop carries the objects that its body makes, from their first values on. `check_loop` finds them,
and refuses all other changes of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from weft.lifting import CARRY
from weft.nnx.filters import Path
from weft.nnx.graph import Flat, NodeDef, Ref, VariableDef, leaf_parts, take_apart
from weft.nnx.recording import Recording
from weft.nnx.structure import is_hashable
from weft.nnx.transforms.calls import changed_in_loop, made_again
from weft.nnx.transforms.differences import Difference, first_difference
from weft.nnx.transforms.growth import Described, Objects, grown
from weft.nnx.transforms.halves import (
    Changed,
    Grouping,
    Groups,
    Inner,
    Static,
    Wanted,
    described,
    is_changed,
    values_of,
)


def difference(a: Described, b: Described, may_lack: bool) -> Difference | None:
    """Returns the first difference; `may_lack` ignores attributes that can be made earlier."""
    tables = Objects.of(a), Objects.of(b)
    return first_difference(
        (a.graphdef, b.graphdef),
        (a.origins, b.origins),
        lambda side, ident, name: may_lack and tables[side].may_make(ident, name),
    )


def grown_half(
    static: Static,
    found: Described,
    gained: Sequence[tuple[int, Hashable]],
    made: dict[int, tuple[int, int]],
) -> Static:
    """Returns the static half of objects that have gained attributes.

    `gained` has numbers of objects and names of attributes; `made` the argument and group of each
    new value.
    """
    one = grown(described(static, None), found, gained)
    index = {origin: i for i, origin in enumerate(one.origins)}
    places = {**dict(zip(static.numbers, static.places, strict=True)), **made}
    owners = dict(zip(static.numbers, static.owners, strict=True))
    outer = static.origins
    return static._replace(
        graphdef=one.graphdef,
        places=tuple(places[n] for n in one.numbers),
        owners=tuple((o := owners.get(n)) and (index[o[0]], o[1]) for n in one.numbers),
        numbers=tuple(one.numbers),
        origins=tuple(o if o is None or outer is None else outer[o] for o in one.origins),
    )


def note_counts(
    static: Static,
    flat: Flat,
    inner: Inner,
    groups: Sequence[Groups],
) -> None:
    """Adds the key counts at the time when the last variable was made to the groups."""
    if inner.recording is None:
        return
    new = [leaf for leaf in flat.leaves if leaf in inner.recording]
    numbers = {id(x): n for n, (x, _) in enumerate(values_of(static, inner.objects, inner.values))}
    for count, value in inner.recording.counts_after(new):
        n = numbers[id(count)]
        i, g = static.places[n]
        groups[i][g][~static.numbers[n]] = value


def note_made(
    recording: Recording,
    static: Changed,
    objects: Sequence[Any],
    found: dict[int, Any],
    outer: Flat,
) -> None:
    """Records the variables that a transformation has made, with their first values."""
    counts = {id(outer.leaves[~n]): x for n, x in found.items() if ~len(outer.leaves) < n < 0}
    for part, key in zip(leaf_parts(static.graphdef), static.keys, strict=True):
        if isinstance(part, VariableDef) and static.origins[part.index] is None:
            made = objects[part.index]
            recording.note(made, found.get(~key, made._value), counts)


def check_loop_values(
    static: Static, carriers: Sequence[Any], filters: Sequence[Wanted], inner: Inner
) -> None:
    """Refuses changes that a loop without graph updates would lose: all but values of variables.

    Static values and new attributes of objects that the loop does not carry are dropped, as in
    every transformation without graph updates.
    """
    flat = take_apart((tuple(carriers), ()), with_metadata=False)
    now = dict(zip(flat.graphdef.paths, flat.leaves, strict=True))
    values = values_of(static, inner.objects, inner.values)
    for n, (path, (variable, value)) in enumerate(zip(static.graphdef.paths, values, strict=True)):
        if variable is not None and now.get(path, variable) is not variable:
            raise changed_in_loop(path, "replaces the variable")
        if variable is None and is_changed(now.get(path, value), inner, n):
            raise changed_in_loop(path, "changes the array")
    grouping = Grouping(filters, ())

    def is_dropped(_: Flat, path: Path) -> bool:
        return not any(role is CARRY for role in grouping.roles(path))

    origin = {id(x): i for i, x in enumerate(inner.objects)}
    origins = [origin.get(id(x)) for x in flat.objects]
    found = Described(flat.graphdef, origins, range(len(flat.leaves)))
    check_loop(static, flat, found, is_dropped, None)


def check_loop(
    static: Static,
    after: Flat,
    found: Described,
    may_change: Callable[[Flat, Path], bool],
    recording: Recording | None,
) -> list[tuple[int, Hashable]]:
    """Refuses changes of the graph, except where `may_change` allows them.

    Returns:
        The attributes to make before the loop: indices of their objects, and names.
    """
    origins, gained = found.origins, []
    objects = Objects.of(found)
    known = dict(zip(found.numbers, after.leaves, strict=True))

    def compare(a: Any, b: Any, path: Path) -> None:
        if isinstance(a, NodeDef) and isinstance(b, NodeDef) and a.type is b.type:
            old, new = dict(a.attributes), dict(b.attributes)
            for name in {**old, **new}:
                if name in old and name in new:
                    compare(old[name], new[name], (*path, name))
                elif not may_change(after, (*path, name)):
                    if name in new and is_made(b, name):
                        gained.append((a.index, name))
                        continue
                    change = "makes an attribute" if name in new else "removes the attribute"
                    raise changed_in_loop((*path, name), change)
            return
        if isinstance(b, Ref | NodeDef | VariableDef):
            b_index = origins[b.index] if b.index is not None else None
            same = type(a) is type(b) and a.index == b_index
        else:
            same = a == b
        if not same and not may_change(after, path):
            if was_made(a):
                raise made_again(path)
            raise changed_in_loop(path, "changes a reference or static value")

    def was_made(part: Any) -> bool:
        index = getattr(part, "index", None)
        return index is not None and static.origins is not None and static.origins[index] is None

    def is_recorded(variable: Any) -> bool:
        is_plain = not isinstance(variable._value, jax.Ref)
        is_plain = is_plain and all(map(is_hashable, variable._metadata.values()))
        return recording is not None and variable in recording and is_plain

    def is_made(node: NodeDef, name: Hashable) -> bool:
        ident = None if node.index is None else origins[node.index]
        return (
            recording is not None
            and static.origins is None  # otherwise already made
            and objects.may_make(ident, name)
            and all(is_recorded(known[n]) for n in objects.numbers_in(ident, name))
        )

    old, new = (dict(root.attributes)[0] for root in (static.graphdef.root, after.graphdef.root))
    compare(old, new, (0,))
    return gained
