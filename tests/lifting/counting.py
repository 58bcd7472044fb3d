"""A kind of about fifty lines: boxes that hold arrays by name; and a counter of traces."""

import dataclasses

import jax

from weft.core.filters import group_collections
from weft.errors import ForkError
from weft.lifting import Kind


class Box:
    """A writable dict of arrays, and a counter of the writes, which is not an array."""

    def __init__(self, **arrays):
        self.arrays = dict(arrays)
        self.writes = 0

    def write(self, name, value):
        self.arrays[name] = value
        self.writes += 1

    def changes_since(self, before):
        return Box(**{n: x for n, x in self.arrays.items() if x is not before.get(n)})


def grouped(boxes, parts):
    groups = []
    for box, of_box in zip(boxes, parts, strict=True):
        groups.append(group_collections(box.arrays, [where for where, _ in of_box]))
    return groups


def ungrouped(groups):
    return {name: value for group in groups for name, value in (group or {}).items()}


@dataclasses.dataclass(frozen=True)
class BoxKind(Kind):
    carrier_types = (Box,)

    def split(self, carriers, parts):
        return list(carriers), len(carriers), grouped(carriers, parts)

    def merge(self, static, groups):
        before = [ungrouped(g) for g in groups]
        return before, [Box(**arrays) for arrays in before]

    def collect(self, inner, static, carriers, parts, returned):
        counts = tuple(box.writes for box in carriers)
        changed = [box.changes_since(before) for box, before in zip(carriers, inner, strict=True)]
        return counts, grouped(changed, parts), grouped(returned.carriers, returned.parts)

    def commit(self, outer, static, groups, new_groups):
        for box, writes, of_box in zip(outer, static, groups, strict=True):
            box.arrays.update(ungrouped(of_box))
            box.writes += writes
        return [Box(**ungrouped(g)) for g in new_groups]

    def union(self, group, other):
        return {**group, **other}

    def fork(self, group, n):
        for name, value in group.items():
            if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
                raise ForkError(
                    f"{name} is not a PRNG key, so it cannot be forked; give it an axis."
                )
        return {name: jax.random.split(key, n) for name, key in group.items()}


BOXES = BoxKind()


TICKS = []


@dataclasses.dataclass(frozen=True)
class Tick:
    """Counts traces; a list in a closure would make its function equal only to itself."""

    def __call__(self):
        TICKS.append(1)
