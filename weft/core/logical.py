"""Logical axes: names of a model's axes that rules map to mesh axes.

A model names its axes, as `("embed", "heads")`; the rules of `weft.core.axis_rules` define their
layout on a mesh. All rules are applied by `assign`, which returns for each axis the entry of the
layout and the rules that were used or skipped. All functions raise LogicalAxisError for invalid
names or rules and repeated names. Defaults are the context's rules and the mesh of `jax.set_mesh`.
"""

import enum
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft import errors, struct
from weft.core import meta, spmd
from weft.core.axis_rules import Rule, Rules, checked_rules, get_logical_axis_rules
from weft.typing import MeshAxes

AnyRules = Iterable[Sequence[Any]]

_FREE = PartitionSpec.UNCONSTRAINED


class AxisAssignment(NamedTuple):
    """Result of the rules for one axis.

    Attributes:
        name: the logical name, None, or given mesh axes.
        rule: index of the rule that provided the entry, or None.
        passed: indices of skipped rules for the name, whose mesh axes were taken.
    """

    name: Any
    entry: Any
    rule: int | None = None
    passed: tuple[int, ...] = ()

    @property
    def is_unassigned(self) -> bool:
        """True if the axis had rules, but all were skipped."""
        return self.rule is None and bool(self.passed)


def assign(names: Iterable[Any], rules: Rules) -> list[AxisAssignment]:
    """Applies rules to the names of one array's axes.

    Args:
        names: for each axis a logical name, None, `PartitionSpec.UNCONSTRAINED`, or a tuple of mesh
            axes, which are used unchanged.
    """
    axes = [
        AxisAssignment(name, None if isinstance(name, str) else name) for name in _checked(names)
    ]
    where = {axis.name: i for i, axis in enumerate(axes) if isinstance(axis.name, str)}
    taken = {mesh_axis for axis in axes for mesh_axis in spmd.axes_of(axis.entry)}
    for index, (name, mesh_axes) in enumerate(rules):
        if name not in where or axes[where[name]].rule is not None:
            continue
        axis = axes[where[name]]
        wanted = set(spmd.axes_of(mesh_axes))
        if wanted & taken:
            axes[where[name]] = axis._replace(passed=(*axis.passed, index))
        else:
            axes[where[name]] = axis._replace(entry=mesh_axes, rule=index)
            taken |= wanted
    return axes


def _checked(names: object) -> list[Any]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise errors.LogicalAxisError(
            f"{names!r} was given for the names of an array's axes; expected one entry for each "
            f"axis. For one axis write ({names!r},)."
        )
    names = [tuple(name) if isinstance(name, list) else name for name in names]
    for name in names:
        is_tuple = isinstance(name, tuple) and all(isinstance(part, str) for part in name)
        if not (name is None or name is _FREE or isinstance(name, str) or is_tuple):
            raise errors.LogicalAxisError(
                f"{name!r} in {tuple(names)} is not a name of an axis; expected a logical name, a "
                "tuple of mesh axes, or None."
            )
    texts = [name for name in names if isinstance(name, str)]
    twice = sorted({name for name in texts if texts.count(name) > 1})
    if twice:
        raise errors.LogicalAxisError(
            f"the logical axis {', '.join(map(repr, twice))} is there more than once in "
            f"{tuple(names)}, and one array can be split only once over a mesh axis; give each of "
            "its axes another name, or None."
        )
    return names


def conflict_message(axis: AxisAssignment, axes: Sequence[AxisAssignment], rules: Rules) -> str:
    """Returns a message about an axis whose rules were all skipped."""
    rule: Rule = rules[axis.passed[0]]
    holders = [
        f"{mesh_axis!r} is used by {other.name!r}"
        for mesh_axis in spmd.axes_of(rule[1])
        for other in axes
        if mesh_axis in spmd.axes_of(other.entry)
    ]
    return (
        f"in {tuple(a.name for a in axes)} the rule {rule!r} conflicts with another, as "
        f"{' and '.join(holders)}; so the axis is not split. Put the more important rule first, "
        f"or, if this is intended, add a rule ({axis.name!r}, None) after it."
    )


def _rules_or_context(rules: AnyRules | None) -> Rules:
    return get_logical_axis_rules() if rules is None else checked_rules(rules)


def logical_to_mesh_axes(
    array_dim_names: Iterable[Any] | None, rules: AnyRules | None = None
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
    return PartitionSpec(*(a.entry for a in assign(array_dim_names, _rules_or_context(rules))))


def names_to_mesh_axes(names: Iterable[Any], rules: AnyRules | None = None) -> PartitionSpec:
    """Returns the layout of an array whose axes have names of logical or mesh axes.

    Args:
        names: for each axis a name, a tuple of names, or None. Names with a rule are replaced by
            its mesh axes, also in a tuple; names without a rule are mesh axes.

    >>> names_to_mesh_axes(("embed", ("data", "fsdp")), [("embed", "model"), ("fsdp", None)])
    P('model', 'data')
    """
    rules = _rules_or_context(rules)
    if not rules:
        return PartitionSpec(*(tuple(n) if isinstance(n, list) else n for n in names))
    axes = [axis.entry for axis in assign(mark_mesh_axes(names, rules), rules)]
    return PartitionSpec(*(a[0] if isinstance(a, tuple) and len(a) == 1 else a for a in axes))


def mark_mesh_axes(names: Iterable[Any], rules: Rules) -> list[Any]:
    """Converts names of `names_to_mesh_axes` for `assign`, with mesh axes in tuples.

    >>> rules = [("embed", "model"), ("fsdp", None)]
    >>> mark_mesh_axes(("embed", "model", ("data", "fsdp")), rules)
    ['embed', ('model',), ('data',)]
    """
    meant = dict(reversed(rules))

    def entry(name: object) -> Any:
        if isinstance(name, str):
            return name if name in meant else (name,)
        if not isinstance(name, tuple | list):
            return name
        parts = [axis for part in name for axis in spmd.axes_of(meant.get(part, part))]
        return tuple(dict.fromkeys(parts)) or None

    return [entry(name) for name in names]


def _are_names(x: Any) -> bool:
    is_row = type(x) in (tuple, list) and any(isinstance(name, str) for name in x)
    return isinstance(x, PartitionSpec) or is_row


def logical_to_mesh(tree: object, rules: AnyRules | None = None) -> Any:
    """Returns the layouts of a tree of arrays whose axes have logical names.

    `tree` contains `PartitionSpec`s or tuples with logical names, as `get_partition_spec` returns.

    >>> logical_to_mesh({"w": PartitionSpec("embed"), "step": None}, [("embed", "data")])
    {'step': None, 'w': P('data',)}
    """

    def convert(x: Any) -> Any:
        if not _are_names(x):
            raise errors.LogicalAxisError(
                f"the logical names of an array's axes are a {type(x).__name__}: "
                f"{x!r}; expected a PartitionSpec. For boxed variables, call get_partition_spec "
                "first."
            )
        return logical_to_mesh_axes(x, rules)

    return jax.tree.map(convert, tree, is_leaf=_are_names)


def logical_to_mesh_sharding(tree: object, mesh: Mesh, rules: AnyRules | None = None) -> Any:
    """Returns the layouts of `logical_to_mesh` as `NamedSharding`s over a mesh."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        logical_to_mesh(tree, rules),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


class RulesFallback(enum.Enum):
    """Handling of a logical name without a mesh axis in a constraint."""

    AXIS_IS_UNSHARDED = "axis_is_unsharded"
    RAISE_ERROR = "raise_error"
    NO_CONSTRAINT = "no_constraint"


def with_logical_constraint(
    x: object,
    logical_axis_resources: object,
    rules: AnyRules | None = None,
    mesh: spmd.AnyMesh | None = None,
    fallback: RulesFallback = RulesFallback.AXIS_IS_UNSHARDED,
) -> Any:
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
    found = _rules_or_context(rules)
    if not found or logical_axis_resources is None:
        return x

    def apply(names: object, part: object) -> Any:
        return part if names is None else _constrain(part, names, found, mesh, fallback)

    def is_leaf(names: object) -> bool:
        nameless = type(names) is tuple and all(n is None or n is _FREE for n in names)
        return names is None or nameless or _are_names(names)

    return jax.tree.map(apply, logical_axis_resources, x, is_leaf=is_leaf)


def _constrain(
    x: Any, names: Any, rules: Rules, mesh: spmd.AnyMesh | None, fallback: RulesFallback
) -> Any:
    axes = assign(names, rules)
    nothing = [axis.name for axis in axes if isinstance(axis.name, str) and axis.rule is None]
    if nothing and fallback is RulesFallback.RAISE_ERROR:
        lost = [conflict_message(axis, axes, rules) for axis in axes if axis.is_unassigned]
        raise errors.LogicalAxisError(
            f"no rule gave a mesh axis to {', '.join(map(repr, nothing))} in {tuple(names)}; add "
            f"a rule, as ({nothing[0]!r}, None) for an axis that is not split."
            + "".join(f" And {text}" for text in lost)
        )
    if nothing and fallback is RulesFallback.NO_CONSTRAINT:
        return x
    if mesh is None and spmd.get_global_mesh() is None:
        return x
    for axis in axes:
        if axis.is_unassigned:
            warnings.warn(conflict_message(axis, axes, rules), errors.ShardingWarning, stacklevel=2)
    return spmd.constrain(x, PartitionSpec(*(axis.entry for axis in axes)), mesh)


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

    def unbox(self, apply_constraint: bool = True) -> Any:
        """Returns the value, laid out by the rules unless `apply_constraint` is False.

        The errors and warnings are those of `with_logical_constraint`.
        """
        if not apply_constraint:
            return self.value
        return with_logical_constraint(
            self.value, self.get_partition_spec(), rules=self.rules, mesh=self.mesh
        )

    def get_sharding(self, mesh: Mesh) -> NamedSharding:
        """Returns the layout of the value over a mesh; raises LogicalAxisError without rules."""
        rules = _rules_or_context(self.rules)
        if not rules:
            raise errors.LogicalAxisError(
                f"the names {self.names!r} are logical, and there are no rules that say which mesh "
                "axes they stand for; ask inside of logical_axis_rules(rules)."
            )
        return NamedSharding(mesh, PartitionSpec(*(a.entry for a in assign(self.names, rules))))

    def to_nnx_metadata(self) -> dict[str, Any]:
        return super().to_nnx_metadata() | {"sharding_rules": self.rules}

    @classmethod
    def from_nnx_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        rules = metadata.get("sharding_rules")
        return super().from_nnx_metadata(metadata).replace(rules=rules)


def with_logical_partitioning(
    fn: Callable[..., Any], names: MeshAxes, mesh: Mesh | None = None, rules: AnyRules | None = None
) -> Callable[..., LogicallyPartitioned]:
    """Wraps an initializer, or a factory of initializers, to return a `LogicallyPartitioned`.

    >>> init = with_logical_partitioning(jax.nn.initializers.ones, ("embed", "heads"))
    >>> init(jax.random.key(0), (4, 8)).names
    ('embed', 'heads')
    """
    return meta.boxed(fn, LogicallyPartitioned, names, mesh, rules)
