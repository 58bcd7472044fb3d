"""Logical axes: names of a model's axes that rules map to mesh axes.

A model names its axes, as `("embed", "heads")`; the rules of `weft.core.axis_rules` define their
layout on a mesh. All rules are applied by `assign`, which returns for each axis the entry of the
layout and the rules that were used or skipped. All functions raise LogicalAxisError for invalid
names or rules and repeated names. Defaults are the context's rules and the mesh of `jax.set_mesh`.
"""

import enum
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft import errors, struct
from weft.core import meta, spmd
from weft.core.axis_rules import (
    Rule,
    Rules,
    checked_rules,
    get_logical_axis_rules,
)
from weft.typing import MeshAxes, PyTree

AnyRules = Iterable[Sequence[Any]]

AxisEntry = (
    Any  # a name, a tuple of names, None, or `PartitionSpec.UNCONSTRAINED`
)

_FREE = PartitionSpec.UNCONSTRAINED


class AxisAssignment(NamedTuple):
    """Result of the rules for one axis.

    Attributes:
        name: the logical name, None, or given mesh axes.
        rule: index of the rule that provided the entry, or None.
        passed: indices of skipped rules for the name, whose mesh axes were taken.
    """

    name: AxisEntry
    entry: AxisEntry
    rule: int | None = None
    passed: tuple[int, ...] = ()

    @property
    def is_unassigned(self) -> bool:
        """True if the axis had rules, but all were skipped."""
        return self.rule is None and bool(self.passed)


def assign(names: Iterable[AxisEntry], rules: Rules) -> list[AxisAssignment]:
    """Applies rules to the names of one array's axes.

    Args:
        names: for each axis a logical name, None, `PartitionSpec.UNCONSTRAINED`, or a tuple of mesh
            axes, which are used unchanged.
    """
    axes: list[AxisAssignment] = []
    positions: dict[str, int] = {}
    used_mesh_axes: set[str] = set()
    for name in _check_names(names):
        if isinstance(name, str):
            positions[name] = len(axes)
            axes.append(AxisAssignment(name, None))
        else:
            used_mesh_axes.update(spmd.axes_of(name))
            axes.append(AxisAssignment(name, name))
    for index, (name, entry) in enumerate(rules):
        if name not in positions:
            continue
        position = positions[name]
        axis = axes[position]
        if axis.rule is not None:
            continue
        mesh_axes = set(spmd.axes_of(entry))
        if mesh_axes & used_mesh_axes:
            axes[position] = axis._replace(passed=(*axis.passed, index))
        else:
            axes[position] = axis._replace(entry=entry, rule=index)
            used_mesh_axes |= mesh_axes
    return axes


def _layout(axes: Iterable[AxisAssignment]) -> PartitionSpec:
    return PartitionSpec(*(axis.entry for axis in axes))


def _check_names(names: Iterable[AxisEntry]) -> list[AxisEntry]:
    """Returns names of axes, lists as tuples; raises LogicalAxisError for other values."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise errors.LogicalAxisError(
            f"{names!r} was given for the names of an array's axes; expected one entry for each "
            f"axis. For one axis write ({names!r},)."
        )
    names = _with_tuples(names)
    counts: Counter[str] = Counter()
    for name in names:
        if isinstance(name, str):
            counts[name] += 1
            continue
        is_tuple = isinstance(name, tuple) and all(
            isinstance(part, str) for part in name
        )
        if not (name is None or name is _FREE or is_tuple):
            raise errors.LogicalAxisError(
                f"{name!r} in {tuple(names)} is not a name of an axis; expected a logical name, a "
                "tuple of mesh axes, or None."
            )
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise errors.LogicalAxisError(
            f"the logical axis {', '.join(map(repr, repeated))} is there more than once in "
            f"{tuple(names)}, and one array can be split only once over a mesh axis; give each of "
            "its axes another name, or None."
        )
    return names


def _with_tuples(names: Iterable[AxisEntry]) -> list[AxisEntry]:
    """Returns names of axes with tuples, which are hashable, in place of lists."""
    return [tuple(name) if isinstance(name, list) else name for name in names]


def conflict_message(
    axis: AxisAssignment, axes: Sequence[AxisAssignment], rules: Rules
) -> str:
    """Returns a message about an axis whose rules were all skipped."""
    rule: Rule = rules[axis.passed[0]]
    holders: list[str] = []
    for mesh_axis in spmd.axes_of(rule[1]):
        for other in axes:
            if mesh_axis in spmd.axes_of(other.entry):
                holders.append(f"{mesh_axis!r} is used by {other.name!r}")
    names = tuple(other.name for other in axes)
    return (
        f"in {names} the rule {rule!r} conflicts with another, as "
        f"{' and '.join(holders)}; so the axis is not split. Put the more important rule first, "
        f"or, if this is intended, add a rule ({axis.name!r}, None) after it."
    )


def _rules_or_context(rules: AnyRules | None) -> Rules:
    return get_logical_axis_rules() if rules is None else checked_rules(rules)


def logical_to_mesh_axes(
    array_dim_names: Iterable[AxisEntry] | None, rules: AnyRules | None = None
) -> PartitionSpec | None:
    """Returns the layout of an array whose axes have logical names.

    Args:
        array_dim_names: for each axis a logical name, None, or a tuple of mesh axes, which are used
            unchanged. Names without a rule are not split. None, for no layout, returns None.

    >>> logical_to_mesh_axes(("embed", "heads"), [("heads", "model")])
    P(None, 'model')
    """
    if array_dim_names is None:
        return None
    return _layout(assign(array_dim_names, _rules_or_context(rules)))


def names_to_mesh_axes(
    names: Iterable[AxisEntry], rules: AnyRules | None = None
) -> PartitionSpec:
    """Returns the layout of an array whose axes have names of logical or mesh axes.

    Args:
        names: for each axis a name, a tuple of names, or None. Names with a rule are replaced by
            its mesh axes, also in a tuple; names without a rule are mesh axes.

    >>> names_to_mesh_axes(("embed", ("data", "fsdp")), [("embed", "model"), ("fsdp", None)])
    P('model', 'data')
    """
    rules = _rules_or_context(rules)
    if not rules:
        return PartitionSpec(*_with_tuples(names))
    entries: list[AxisEntry] = []
    for axis in assign(mark_mesh_axes(names, rules), rules):
        is_single = isinstance(axis.entry, tuple) and len(axis.entry) == 1
        entries.append(axis.entry[0] if is_single else axis.entry)
    return PartitionSpec(*entries)


def mark_mesh_axes(names: Iterable[AxisEntry], rules: Rules) -> list[AxisEntry]:
    """Converts names of `names_to_mesh_axes` for `assign`, with mesh axes in tuples.

    >>> rules = [("embed", "model"), ("fsdp", None)]
    >>> mark_mesh_axes(("embed", "model", ("data", "fsdp")), rules)
    ['embed', ('model',), ('data',)]
    """
    first_rules = dict(reversed(rules))

    def mark(name: AxisEntry) -> AxisEntry:
        if isinstance(name, str):
            return name if name in first_rules else (name,)
        if not isinstance(name, tuple | list):
            return name
        mesh_axes: dict[str, None] = {}  # in order, each once
        for part in name:
            mesh_axes |= dict.fromkeys(
                spmd.axes_of(first_rules.get(part, part))
            )
        return tuple(mesh_axes) or None

    return [mark(name) for name in names]


def _are_names(x: PyTree) -> bool:
    is_row = type(x) in (tuple, list) and any(
        isinstance(name, str) for name in x
    )
    return isinstance(x, PartitionSpec) or is_row


def logical_to_mesh(tree: PyTree, rules: AnyRules | None = None) -> PyTree:
    """Returns the layouts of a tree of arrays whose axes have logical names.

    `tree` contains `PartitionSpec`s or tuples with logical names, as `get_partition_spec` returns.

    >>> logical_to_mesh({"w": PartitionSpec("embed"), "step": None}, [("embed", "data")])
    {'step': None, 'w': P('data',)}
    """

    def convert(x: PyTree) -> PartitionSpec | None:
        if not _are_names(x):
            raise errors.LogicalAxisError(
                f"the logical names of an array's axes are a {type(x).__name__}: "
                f"{x!r}; expected a PartitionSpec. For boxed variables, call get_partition_spec "
                "first."
            )
        return logical_to_mesh_axes(x, rules)

    return jax.tree.map(convert, tree, is_leaf=_are_names)


def logical_to_mesh_sharding(
    tree: PyTree, mesh: Mesh, rules: AnyRules | None = None
) -> PyTree:
    """Returns the layouts of `logical_to_mesh` as `NamedSharding`s over a mesh."""
    specs = logical_to_mesh(tree, rules)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


class RulesFallback(enum.Enum):
    """Handling of a logical name without a mesh axis in a constraint."""

    AXIS_IS_UNSHARDED = "axis_is_unsharded"
    RAISE_ERROR = "raise_error"
    NO_CONSTRAINT = "no_constraint"


def with_logical_constraint(
    x: PyTree,
    logical_axis_resources: PyTree,
    rules: AnyRules | None = None,
    mesh: spmd.AnyMesh | None = None,
    fallback: RulesFallback = RulesFallback.AXIS_IS_UNSHARDED,
) -> PyTree:
    """Lays out a value over a mesh by the logical names of its axes.

    Without rules or a mesh, `x` is returned unchanged.

    Args:
        logical_axis_resources: names of its axes, or a prefix tree of them; None changes nothing.
        fallback: handling of a name without a mesh axis; `RAISE_ERROR` raises LogicalAxisError.

    Raises MeshError if the mesh lacks an axis, or there are more names than axes.

    Warns:
        ShardingWarning: if rules for two names conflict, or a mesh axis does not divide an axis.

    >>> with_logical_constraint(1.0, ("embed",), [("embed", "data")])
    1.0
    """
    checked = _rules_or_context(rules)
    if not checked or logical_axis_resources is None:
        return x

    def apply(names: PyTree, part: PyTree) -> PyTree:
        return (
            part
            if names is None
            else _constrain(part, names, checked, mesh, fallback)
        )

    def is_leaf(names: PyTree) -> bool:
        if type(names) is tuple and all(
            name is None or name is _FREE for name in names
        ):
            return True
        return names is None or _are_names(names)

    return jax.tree.map(apply, logical_axis_resources, x, is_leaf=is_leaf)


def _constrain(
    x: PyTree,
    names: Iterable[AxisEntry],
    rules: Rules,
    mesh: spmd.AnyMesh | None,
    fallback: RulesFallback,
) -> PyTree:
    axes = assign(names, rules)
    unsplit = [
        axis.name
        for axis in axes
        if isinstance(axis.name, str) and axis.rule is None
    ]
    if unsplit and fallback is RulesFallback.RAISE_ERROR:
        conflicts = ""
        for axis in axes:
            if axis.is_unassigned:
                conflicts += f" And {conflict_message(axis, axes, rules)}"
        raise errors.LogicalAxisError(
            f"no rule gave a mesh axis to {', '.join(map(repr, unsplit))} in {tuple(names)}; add "
            f"a rule, as ({unsplit[0]!r}, None) for an axis that is not split.{conflicts}"
        )
    if unsplit and fallback is RulesFallback.NO_CONSTRAINT:
        return x
    if mesh is None and spmd.get_global_mesh() is None:
        return x
    for axis in axes:
        if axis.is_unassigned:
            warnings.warn(
                conflict_message(axis, axes, rules),
                errors.ShardingWarning,
                stacklevel=2,
            )
    return spmd.constrain(x, _layout(axes), mesh)


class LogicallyPartitioned(meta.Partitioned):
    """Value with a logical name for each of its axes.

    `unbox` lays the value out by the rules over `mesh`, or over the mesh of `jax.set_mesh`.

    Attributes:
        value: an array, or a tree of arrays with the same axes.
        names: for each axis a logical name, a tuple of mesh axes, or None.
    """

    rules: Rules | None = struct.field(pytree_node=False, default=None)

    def __post_init__(self):
        super().__post_init__()
        if self.rules is not None:
            object.__setattr__(self, "rules", checked_rules(self.rules))

    def unbox(self, apply_constraint: bool = True) -> PyTree:
        """Returns the value, laid out by the rules unless `apply_constraint` is False.

        The errors and warnings are those of `with_logical_constraint`.
        """
        if not apply_constraint:
            return self.value
        return with_logical_constraint(
            self.value,
            self.get_partition_spec(),
            rules=self.rules,
            mesh=self.mesh,
        )

    def get_sharding(self, mesh: Mesh) -> NamedSharding:
        """Returns the layout of the value over a mesh; raises LogicalAxisError without rules."""
        rules = _rules_or_context(self.rules)
        if not rules:
            raise errors.LogicalAxisError(
                f"the names {self.names!r} are logical, and there are no rules that say which mesh "
                "axes they stand for; ask inside of logical_axis_rules(rules)."
            )
        return NamedSharding(mesh, _layout(assign(self.names, rules)))

    def to_nnx_metadata(self) -> dict[str, Any]:
        return super().to_nnx_metadata() | {"sharding_rules": self.rules}

    @classmethod
    def from_nnx_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        rules = metadata.get("sharding_rules")
        return super().from_nnx_metadata(metadata).replace(rules=rules)


def with_logical_partitioning(
    fn: Callable[..., Any],
    names: MeshAxes,
    mesh: Mesh | None = None,
    rules: AnyRules | None = None,
) -> Callable[..., LogicallyPartitioned]:
    """Wraps an initializer, or a factory of initializers, to return a `LogicallyPartitioned`.

    >>> init = with_logical_partitioning(jax.nn.initializers.ones, ("embed", "heads"))
    >>> init(jax.random.key(0), (4, 8)).names
    ('embed', 'heads')
    """
    return meta.boxed(fn, LogicallyPartitioned, names, mesh, rules)
