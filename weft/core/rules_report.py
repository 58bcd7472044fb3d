"""Checks of rules for logical axes before use.

`check_rules` applies rules to the shapes of a model's variables and lists probable mistakes: unused
rules, names without a rule, conflicting rules, and indivisible axes.

avals = jax.eval_shape(init, key)
for finding in check_rules(rules, avals, mesh):
    print(finding)
"""

import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from weft.core.axis_rules import Rule, Rules, checked_rules
from weft.core.logical import AxisAssignment, LogicallyPartitioned, assign, conflict_message
from weft.core.meta import Partitioned, is_axis_metadata
from weft.core.spmd import AnyMesh, axes_of, get_global_mesh


class FindingKind(enum.Enum):
    """Kind of a finding."""

    UNUSED_RULE = "a rule is never used"
    MISSING_RULE = "a logical name has no rule"
    FIGHTING_RULES = "two rules want one mesh axis"
    UNKNOWN_MESH_AXIS = "the mesh has no such axis"
    INDIVISIBLE_AXIS = "an axis does not divide"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Probable mistake in rules: `path` of the variable or "", and the unused `rule` or None."""

    kind: FindingKind
    message: str
    path: str = ""
    rule: Rule | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def check_rules(
    rules: Iterable[Sequence[Any]], tree: object, mesh: AnyMesh | None = None
) -> list[Finding]:
    """Lists probable mistakes in rules for logical axes.

    Args:
        tree: boxed variables, or their shapes from `jax.eval_shape`. Rules in a box have priority.
        mesh: by default that of `jax.set_mesh`; without either, checks of the mesh are skipped.

    Raises LogicalAxisError if the rules, or the names of a variable, are invalid.

    >>> tree = {"w": LogicallyPartitioned(jax.numpy.ones(3), ("embed",))}
    >>> for finding in check_rules([("heads", "model")], tree):
    ...     print(finding)
    w: no rule is for 'embed', so the axis is not split; add ('embed', None) if this is meant.
    the rule ('heads', 'model') is never used: no axis is called 'heads'.
    """
    rules = checked_rules(rules)
    mesh = get_global_mesh() if mesh is None else mesh
    findings: list[Finding] = []
    used: set[int] = set()
    passed: set[int] = set()
    names: set[Any] = set()
    for path, box in _partitioned(tree):
        is_logical = isinstance(box, LogicallyPartitioned)
        own = box.rules if is_logical else None
        applied = own if own is not None else rules if is_logical else ()
        names_of_box = [AxisAssignment(name, name) for name in box.names]
        axes = assign(box.names, applied) if is_logical else names_of_box
        findings += [Finding(kind, text, path) for kind, text in _about_names(axes, applied)]
        findings += [Finding(kind, text, path) for kind, text in _about_sizes(axes, box, mesh)]
        if is_logical and own is None:
            used |= {axis.rule for axis in axes if axis.rule is not None}
            passed.update(*(axis.passed for axis in axes))
            names |= {axis.name for axis in axes}
    if mesh is not None:
        for rule in rules:
            unknown = _unknown(axes_of(rule[1]), mesh, f"by the rule {rule!r} an axis")
            findings += [Finding(kind, text) for kind, text in unknown]
    unused = [index for index in range(len(rules)) if index not in used]
    return findings + [_unused(rules[i], i in passed, names) for i in unused]


def _partitioned(tree: object) -> Iterator[tuple[str, Partitioned]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_axis_metadata):
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        if isinstance(leaf, Partitioned):
            yield where, leaf
        elif is_axis_metadata(leaf):
            yield from ((where, box) for _, box in _partitioned(leaf.unbox()))


def _about_names(axes: list[AxisAssignment], rules: Rules) -> Iterator[tuple[FindingKind, str]]:
    for axis in axes:
        if axis.is_unassigned:
            yield FindingKind.FIGHTING_RULES, conflict_message(axis, axes, rules)
        elif axis.rule is None and axis.entry is None and axis.name is not None:
            yield (
                FindingKind.MISSING_RULE,
                f"no rule is for {axis.name!r}, so the axis is not split; add "
                f"({axis.name!r}, None) if this is meant.",
            )


def _about_sizes(
    axes: list[AxisAssignment], box: Partitioned, mesh: AnyMesh | None
) -> Iterator[tuple[FindingKind, str]]:
    if mesh is None:
        return
    for shape in dict.fromkeys(jax.numpy.shape(leaf) for leaf in jax.tree.leaves(box)):
        for index, (axis, size) in enumerate(zip(axes, shape, strict=False)):
            known = [name for name in axes_of(axis.entry) if name in mesh.shape]
            parts = math.prod(mesh.shape[name] for name in known)
            if size % parts:
                yield (
                    FindingKind.INDIVISIBLE_AXIS,
                    f"axis {index} of shape {shape}, {axis.name!r}, cannot be split into {parts} "
                    f"equal parts over {axis.entry!r}; change its size or its layout.",
                )
            if axis.rule is None:  # unknown mesh axes of a rule are reported once, for the rule
                yield from _unknown(axes_of(axis.entry), mesh, f"axis {index} of shape {shape}")


def _unknown(
    names: Iterable[str], mesh: AnyMesh, subject: str
) -> Iterator[tuple[FindingKind, str]]:
    for name in names:
        if name not in mesh.shape:
            yield (
                FindingKind.UNKNOWN_MESH_AXIS,
                f"{subject} is to be split over {name!r}, and the mesh has the axes "
                f"{', '.join(map(repr, mesh.axis_names))}.",
            )


def _unused(rule: Rule, was_passed: bool, names: set[Any]) -> Finding:
    if rule[0] not in names:
        why = f"no axis is called {rule[0]!r}"
    elif was_passed:
        why = "an earlier rule always takes its mesh axes"
    else:
        why = f"an earlier rule for {rule[0]!r} always holds"
    return Finding(FindingKind.UNUSED_RULE, f"the rule {rule!r} is never used: {why}.", rule=rule)
