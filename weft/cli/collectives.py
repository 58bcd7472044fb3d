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
from collections.abc import Mapping, Sequence

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

Groups = tuple[tuple[int, ...], ...]
"""Positions of devices in the mesh, by the groups that communicate with each other."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?[\w.\-]+ = (?P<shape>.+?) (?P<op>[a-z][\w\-]*)\("
)
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_ARRAY_TYPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_IOTA_GROUPS = re.compile(
    r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]+)\]"
    r"(?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))? \{([^}]*)\}"
)
# An axis, or the part of a size of it after parts of another size: 'a', 'a':(2)4.
_AXIS_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_LISTED_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collective operation of a program.

    Attributes:
        kind: one of `KINDS`.
        shapes: shapes of the arrays that a device receives, such as ("f32[8,64]",), or, for a
            reduce-scatter of a TPU, sends.
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
    groups: Groups

    def axes(self, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
        """Returns the mesh axes that the collective spans; None if its groups match no axes."""
        if not self.groups:
            return None
        axis_names = list(mesh_shape)
        sizes = list(mesh_shape.values())
        positions = np.arange(math.prod(sizes)).reshape(sizes)
        if self.kind == "collective-permute":
            sources, targets = np.transpose(self.groups)
            source_indices = np.stack(np.unravel_index(sources, sizes))
            target_indices = np.stack(np.unravel_index(targets, sizes))
            is_crossed = (source_indices != target_indices).any(axis=1)
            return tuple(itertools.compress(axis_names, is_crossed))
        groups = {frozenset(group) for group in self.groups}
        split_axes = [axis for axis, size in enumerate(sizes) if size > 1]
        for num_axes in range(len(split_axes) + 1):
            for axes in itertools.combinations(split_axes, num_axes):
                if set(map(frozenset, _groups_over(positions, axes))) == groups:
                    return tuple(axis_names[axis] for axis in axes)
        return None


def _groups_over(positions: np.ndarray, axes: Sequence[int]) -> Groups:
    """Returns the positions along some axes, for each index of the others."""
    other_axes = [axis for axis in range(positions.ndim) if axis not in axes]
    group_size = math.prod(positions.shape[axis] for axis in axes)
    return _as_groups(
        positions.transpose(*other_axes, *axes).reshape(-1, group_size)
    )


@dataclasses.dataclass
class _Computation:
    """Lines of a computation, and how often one run of the program runs it."""

    lines: list[str] = dataclasses.field(default_factory=list)
    times: int = 0
    in_loop: bool = False


def collectives_of(hlo: str) -> list[Collective]:
    """Returns the collectives in the HLO text of a program, from `jax.stages.Compiled.as_text`."""
    computations, entry = _computations(hlo)
    _count_runs(computations, entry)
    collectives: list[Collective] = []
    for name, computation in computations.items():
        if computation.times == 0:
            continue
        for line in computation.lines:
            collective = _collective(line, computation)
            if collective is None:
                continue
            if name.startswith("all-reduce-scatter"):
                # The compiler for TPUs writes it as an all-reduce and a slice in a fusion.
                collective = dataclasses.replace(
                    collective, kind="reduce-scatter"
                )
            collectives.append(collective)
    return collectives


def _computations(hlo: str) -> tuple[dict[str, _Computation], str]:
    """Returns the computations by name, and the name of the entry computation."""
    computations: dict[str, _Computation] = {}
    entry = ""
    current = _Computation()  # the header of the program
    for line in hlo.splitlines():
        start = _COMPUTATION.match(line)
        if start is None:
            current.lines.append(line)
            continue
        is_entry, name = start.groups()
        current = computations.setdefault(name, _Computation())
        if is_entry:
            entry = name
    return computations, entry


def _count_runs(computations: dict[str, _Computation], entry: str) -> None:
    if entry in computations:
        computations[entry].times = 1
    # Callees come before their callers in the text, so reversed order visits callers first.
    for caller in reversed(computations.values()):
        for line in caller.lines:
            callees = _CALLED.findall(line)
            for branches in _BRANCHES.findall(line):
                callees += re.findall(r"%?([\w.\-]+)", branches)
            is_loop = " while(" in line
            iterations = _trip_count(line, computations) if is_loop else 1
            for name in callees:
                callee = computations.get(name)
                if callee is not None:
                    callee.times += caller.times * iterations
                    callee.in_loop |= is_loop or caller.in_loop


def _trip_count(line: str, computations: dict[str, _Computation]) -> int:
    annotation = _TRIP_COUNT.search(line)
    if annotation:
        return int(annotation[1])
    # The condition of a loop that counts from 0, as in `jax.lax.scan`, contains the trip count.
    condition = re.search(r"\bcondition=%?([\w.\-]+)", line)
    if condition is None or condition[1] not in computations:
        return 1
    text = "\n".join(computations[condition[1]].lines)
    limits = re.findall(r" s32\[\]\S* constant\((\d+)\)", text)
    if len(limits) == 1 and "direction=LT" in text:
        return int(limits[0])
    return 1


def _collective(line: str, computation: _Computation) -> Collective | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    # The first of an asynchronous pair has the groups; the second returns the result.
    is_start = match["op"].endswith("-start")
    kind = match["op"].removesuffix("-start")
    if kind not in KINDS:
        return None
    shape = match["shape"]
    if is_start and kind != "all-reduce":
        # After operands and results, a permutation of a TPU has two numbers of its own.
        _, shape, *_ = _elements(shape)
    arrays = _ARRAY_TYPE.findall(shape)
    groups = _groups(line)
    num_bytes = sum(_bytes(dtype, dims) for dtype, dims in arrays)
    if kind == "reduce-scatter" and groups:
        num_bytes *= len(groups[0])
    return Collective(
        kind=kind,
        shapes=tuple(f"{dtype}[{dims}]" for dtype, dims in arrays),
        bytes=num_bytes,
        times=computation.times,
        in_loop=computation.in_loop,
        groups=groups,
    )


def _elements(shape: str) -> list[str]:
    """Returns the shapes of the elements of a tuple, which may be tuples themselves.

    >>> _elements("((f32[8]{0}, u8[4,2]{1,0:T(8,128)}), f32[16]{0}, u32[])")
    ['(f32[8]{0}, u8[4,2]{1,0:T(8,128)})', 'f32[16]{0}', 'u32[]']
    """
    elements = [""]
    depth = 0
    for character in shape[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return [element.strip() for element in elements]


def _groups(line: str) -> Groups:
    """Returns the device positions of each group, from any of the forms that XLA writes.

    {{0,1},{2,3}}    [2,2]<=[2,2]T(1,0)    mesh['a'=2,'b'=2], device_ids=([4]) {'b'}
    """
    mesh_groups = _MESH_GROUPS.search(line)
    if mesh_groups:
        return _groups_of_mesh(*mesh_groups.groups())
    iota_groups = _IOTA_GROUPS.search(line)
    if iota_groups:
        shape, dims, order = iota_groups.groups()
        return _as_groups(_iota(dims, order).reshape(_numbers(shape)))
    listed_groups = _LISTED_GROUPS.search(line)
    if listed_groups is None:
        return ()
    groups = re.findall(r"\{([\d,]+)\}", listed_groups[1])
    return tuple(tuple(_numbers(group)) for group in groups)


def _groups_of_mesh(
    mesh_axes: str,
    iota_dims: str | None,
    order: str | None,
    device_ids: str | None,
    group_axes: str,
) -> Groups:
    """Returns the groups over some axes of a mesh, or over parts of these."""
    sizes: dict[str, int] = {}
    for name, size in re.findall(r"'([^']+)'=(\d+)", mesh_axes):
        sizes[name] = int(size)
    if device_ids:
        positions = np.array(_numbers(device_ids))
    else:
        num_devices = math.prod(sizes.values())
        positions = _iota(iota_dims or str(num_devices), order)
    parts: dict[str, tuple[int, int]] = {}
    for name, outer_size, part_size in _AXIS_PART.findall(group_axes):
        parts[name] = (
            int(outer_size or 1),
            int(part_size or sizes.get(name, 1)),
        )
    # Each axis becomes three: 'a':(2)4 of an axis of 16 is the middle one of 2, 4 and 2.
    dims: list[int] = []
    axes_of_groups: list[int] = []
    for name, size in sizes.items():
        outer_size, part_size = parts.get(name, (1, size))
        if name in parts:
            axes_of_groups.append(len(dims) + 1)
        dims += [outer_size, part_size, size // (outer_size * part_size)]
    return _groups_over(positions.reshape(dims), axes_of_groups)


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Returns 0, 1, 2 … in this shape, transposed to another order of axes and flattened."""
    shape = _numbers(dims)
    positions = np.arange(math.prod(shape)).reshape(shape)
    if order:
        positions = positions.transpose(_numbers(order))
    return positions.reshape(-1)


def _as_groups(rows: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in rows.tolist())


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _bytes(dtype: str, dims: str) -> int:
    # The first number of f32, bf16, s8, c64, f8e4m3fn, u4 counts bits; a pred takes a byte.
    bits = re.match(r"[a-z]+(\d+)", dtype)
    bits_per_value = int(bits[1]) if bits else 8
    num_values = math.prod(_numbers(dims)) if dims else 1
    return math.ceil(num_values * bits_per_value / 8)
