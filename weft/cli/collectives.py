"""Collectives of a compiled program, read from its HLO text.

A program is a set of computations that call each other. A collective in a loop body runs as often
as the loop, which XLA annotates with its trip count if that is known:

    %body (...) { ... %w = f32[8,64]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], ... }
    ENTRY %main (...) { ... while(...), body=%body, ..."known_trip_count":{"n":"12"} ... }

Groups list positions in the mesh, from which follow the mesh axes that a collective spans.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?P<shape>.+?) (?P<op>[a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESHED = re.compile(
    r"replica_groups=mesh\[([^\]]+)\]"
    r"(?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))? \{([^}]*)\}"
)
_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collective operation of a program.

    Attributes:
        kind: one of `KINDS`.
        shapes: shapes of the arrays that a device receives, such as ("f32[8,64]",).
        bytes: their size; for a reduce-scatter, that of the arrays that a device sends.
        times: number of runs per run of the program; a loop of unknown length counts once.
        in_loop: whether it is in the body of a loop.
        groups: positions of the devices that communicate with each other.
    """

    kind: str
    shapes: tuple[str, ...]
    bytes: int
    times: int
    in_loop: bool
    groups: tuple[tuple[int, ...], ...]

    def axes(self, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
        """Returns the mesh axes that the collective spans; None if its groups match no axes."""
        names = [name for name, size in mesh_shape.items() if size > 1]
        sizes = list(mesh_shape.values())
        places = np.arange(math.prod(sizes)).reshape(sizes)
        if self.kind == "collective-permute":
            where = np.array([np.argwhere(places == p)[0] for pair in self.groups for p in pair])
            moved = (where[::2] != where[1::2]).any(axis=0)
            return tuple(n for n, m in zip(mesh_shape, moved, strict=True) if m)
        wanted = {frozenset(group) for group in self.groups}
        for count in range(len(names) + 1):
            for chosen in itertools.combinations(names, count):
                rows = _rows(places, [list(mesh_shape).index(name) for name in chosen])
                if {frozenset(row) for row in rows} == wanted:
                    return chosen
        return None


def _rows(places: np.ndarray, axes: list[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the places along some axes, for each index of the others."""
    others = [axis for axis in range(places.ndim) if axis not in axes]
    size = math.prod(places.shape[axis] for axis in axes)
    return _as_groups(places.transpose(others + axes).reshape(-1, size))


def collectives_of(hlo: str) -> list[Collective]:
    """Returns the collectives in the HLO text of a program, from `jax.stages.Compiled.as_text`."""
    bodies, entry = _computations(hlo)
    times, in_loop = _executions(bodies, entry)
    found = (
        _collective(line, times[name], name in in_loop)
        for name, lines in bodies.items()
        for line in lines
    )
    return [collective for collective in found if collective is not None and collective.times]


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of each computation, and the name of the entry computation."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in hlo.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            lines = bodies.setdefault(start[2], [])
            entry = start[2] if start[1] else entry
        else:
            lines.append(line)
    return bodies, entry


def _executions(bodies: dict[str, list[str]], entry: str) -> tuple[Counter[str], set[str]]:
    """Returns the number of runs of each computation, and the names of those within loops."""
    times: Counter[str] = Counter({entry: 1})
    in_loop: set[str] = set()
    # Callees come before their callers in the text, so reversed order visits callers first.
    for name in reversed(bodies):
        for line in bodies[name]:
            callees = _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                callees += re.findall(r"%?([\w.\-]+)", branches)
            is_loop = " while(" in line
            trips = _trips(line, bodies) if is_loop else 1
            for callee in callees:
                times[callee] += times[name] * trips
                if is_loop or name in in_loop:
                    in_loop.add(callee)
    return times, in_loop


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    known = _TRIP_COUNT.search(line)
    if known:
        return int(known[1])
    # The condition of a loop that counts from 0, as in `jax.lax.scan`, contains the trip count.
    condition = re.search(r"\bcondition=%?([\w.\-]+)", line)
    text = "\n".join(bodies.get(condition[1], ()) if condition else ())
    limits = re.findall(r" s32\[\]\S* constant\((\d+)\)", text)
    return int(limits[0]) if len(limits) == 1 and "direction=LT" in text else 1


def _collective(line: str, times: int, in_loop: bool) -> Collective | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    # The first of an asynchronous pair has the groups; the second returns the result.
    kind = match["op"].removesuffix("-start")
    if kind not in KINDS:
        return None
    arrays = _ARRAY.findall(match["shape"])
    if match["op"].endswith("-start") and kind != "all-reduce":
        arrays = arrays[len(arrays) // 2 :]  # operands come before results
    groups = _groups(line)
    size = sum(_bytes(dtype, dims) for dtype, dims in arrays)
    if kind == "reduce-scatter":
        size *= len(groups[0]) if groups else 1
    shapes = tuple(f"{dtype}[{dims}]" for dtype, dims in arrays)
    return Collective(kind, shapes, size, times, in_loop, groups)


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    """Returns the device positions of each group, from any of the forms that XLA writes.

    {{0,1},{2,3}}    [2,2]<=[2,2]T(1,0)    mesh['a'=2,'b'=2], device_ids=([4]) {'b'}
    """
    meshed = _MESHED.search(line)
    if meshed:
        return _groups_of_mesh(*meshed.groups())
    iota = _IOTA.search(line)
    if iota:
        return _as_groups(_counted(iota[2], iota[3]).reshape(_numbers(iota[1])))
    listed = _LISTED.search(line)
    groups = re.findall(r"\{([\d,]+)\}", listed[1]) if listed else []
    return tuple(tuple(_numbers(group)) for group in groups)


def _groups_of_mesh(
    axes: str, ids: str | None, order: str | None, listed: str | None, over: str
) -> tuple[tuple[int, ...], ...]:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    count = math.prod(sizes.values())
    places = np.array(_numbers(listed)) if listed else _counted(ids or str(count), order)
    # An axis may be split: 'a':(2)4 is the middle of its parts of 2, 4 and the rest.
    parts = {name: (int(pre or 1), int(size or 0)) for name, pre, size in _PART.findall(over)}
    dims: list[int] = []
    chosen: list[int] = []
    for name, size in sizes.items():
        pre, own = parts.get(name, (1, 1))
        own = own or size
        if name in parts:
            chosen.append(len(dims) + 1)
        dims += [pre, own, size // (pre * own)]
    return _rows(places.reshape(dims), chosen)


def _counted(dims: str, order: str | None) -> np.ndarray:
    """Returns 0, 1, 2 … in this shape, transposed to another order of axes and flattened."""
    shape = _numbers(dims)
    places = np.arange(math.prod(shape)).reshape(shape)
    return (places.transpose(_numbers(order)) if order else places).reshape(-1)


def _as_groups(rows: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in rows)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _bytes(dtype: str, dims: str) -> int:
    # The first number of f32, bf16, s8, c64, f8e4m3fn, u4 counts bits; a pred takes a byte.
    bits = re.match(r"[a-z]+(\d+)", dtype)
    size = int(bits[1]) if bits else 8
    return math.ceil(math.prod(int(d) for d in dims.split(",") if d) * size / 8)
