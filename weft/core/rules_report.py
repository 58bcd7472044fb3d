"""Checks of rules for logical axes before use.

`check_rules` applies rules to the shapes of a model's variables and lists probable mistakes: unused
rules, names without a rule, conflicting rules, and indivisible axes.

avals = jax.eval_shape(init, key)
for finding in check_rules(rules, avals, mesh):
    print(finding)
"""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from weft.core.axis_rules import Rule, Rules, checked_rules
from weft.core.logical import (
    AxisAssignment,
    AxisEntry,
    LogicallyPartitioned,
    assign,
    conflict_message,
)
from weft.core.meta import Partitioned, is_axis_metadata
from weft.core.spmd import AnyMesh, axes_of, get_global_mesh
from weft.typing import PyTree


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
    rules: Iterable[Sequence[Any]], tree: PyTree, mesh: AnyMesh | None = None
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
    # Of the given rules, by index; a box may have rules of its own.
    used_rules: set[int] = set()
    skipped_rules: set[int] = set()
    names: set[AxisEntry] = set()
    for path, box in _partitioned_boxes(tree):
        box_rules: Rules = ()
        if not isinstance(box, LogicallyPartitioned):
            axes = [AxisAssignment(name, name) for name in box.names]
        else:
            box_rules = rules if box.rules is None else box.rules
            axes = assign(box.names, box_rules)
        findings += _check_names(path, axes, box_rules)
        if mesh is not None:
            findings += _check_sizes(path, axes, box, mesh)
        if box_rules is rules:
            for axis in axes:
                names.add(axis.name)
                skipped_rules.update(axis.passed)
                if axis.rule is not None:
                    used_rules.add(axis.rule)
    if mesh is not None:
        for rule in rules:
            findings += _unknown_mesh_axes(
                "", axes_of(rule[1]), mesh, f"by the rule {rule!r} an axis"
            )
    for index, rule in enumerate(rules):
        if index not in used_rules:
            findings.append(_unused_rule(rule, index in skipped_rules, names))
    return findings


def _partitioned_boxes(
    tree: PyTree,
) -> Iterator[tuple[str, Partitioned[PyTree]]]:
    """Yields each `Partitioned` of a tree, also inside of other boxes, with its path."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=is_axis_metadata
    ):
        path_text = jax.tree_util.keystr(path, simple=True, separator="/")
        if isinstance(leaf, Partitioned):
            yield path_text, leaf
        elif is_axis_metadata(leaf):
            for _, inner_box in _partitioned_boxes(leaf.unbox()):
                yield path_text, inner_box


def _check_names(
    path: str, axes: list[AxisAssignment], rules: Rules
) -> Iterator[Finding]:
    """Yields the axes that are not split for want of a rule, or since another one was first."""
    for axis in axes:
        if axis.is_unassigned:
            message = conflict_message(axis, axes, rules)
            yield Finding(FindingKind.FIGHTING_RULES, message, path)
        elif axis.rule is None and axis.entry is None and axis.name is not None:
            message = (
                f"no rule is for {axis.name!r}, so the axis is not split; add "
                f"({axis.name!r}, None) if this is meant."
            )
            yield Finding(FindingKind.MISSING_RULE, message, path)


def _check_sizes(
    path: str,
    axes: list[AxisAssignment],
    box: Partitioned[PyTree],
    mesh: AnyMesh,
) -> Iterator[Finding]:
    """Yields the axes that a mesh cannot split into equal parts."""
    shapes = dict.fromkeys(map(jax.numpy.shape, jax.tree.leaves(box)))
    for shape in shapes:
        for index, (axis, size) in enumerate(zip(axes, shape, strict=False)):
            n_parts = 1
            for mesh_axis in axes_of(axis.entry):
                n_parts *= mesh.shape.get(mesh_axis, 1)
            if size % n_parts:
                message = (
                    f"axis {index} of shape {shape}, {axis.name!r}, cannot be split into {n_parts} "
                    f"equal parts over {axis.entry!r}; change its size or its layout."
                )
                yield Finding(FindingKind.INDIVISIBLE_AXIS, message, path)
            if (
                axis.rule is None
            ):  # unknown mesh axes of a rule are reported once, for the rule
                subject = f"axis {index} of shape {shape}"
                yield from _unknown_mesh_axes(
                    path, axes_of(axis.entry), mesh, subject
                )


def _unknown_mesh_axes(
    path: str, names: Iterable[str], mesh: AnyMesh, subject: str
) -> Iterator[Finding]:
    for name in names:
        if name not in mesh.shape:
            message = (
                f"{subject} is to be split over {name!r}, and the mesh has the axes "
                f"{', '.join(map(repr, mesh.axis_names)) or '(none)'}."
            )
            yield Finding(FindingKind.UNKNOWN_MESH_AXIS, message, path)


def _unused_rule(
    rule: Rule, is_skipped: bool, names: set[AxisEntry]
) -> Finding:
    if rule[0] not in names:
        reason = f"no axis is called {rule[0]!r}"
    elif is_skipped:
        reason = "an earlier rule always takes its mesh axes"
    else:
        reason = f"an earlier rule for {rule[0]!r} always holds"
    return Finding(
        FindingKind.UNUSED_RULE,
        f"the rule {rule!r} is never used: {reason}.",
        rule=rule,
    )
