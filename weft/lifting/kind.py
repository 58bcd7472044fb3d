"""Transfer of a model's state through a JAX transformation.

JAX transforms pure functions of pytrees; a model's state is part of a scope, of objects or of a
context, the *carriers*. The transfer has five stages; a `Kind` implements each for its carriers:

outside   split     carriers -> groups of arrays, and a hashable value for all else
inside    merge     groups -> fresh carriers at the new trace level
inside              the user's function runs
inside    collect   what it changed, and the carriers it returns -> groups
outside   commit    groups -> the caller's own carriers

Between `split_args` and `call_pure`, a `StateNode` with a carrier's groups replaces the carrier in
the arguments; between `call_pure` and `commit`, in the results. The user's trees keep their shape,
so JAX's prefixes (axes, shardings, donation) match. Static values are part of the structure of a
pytree without leaves, and thus of JAX's cache keys. Only `commit` changes the caller's values: a
failed transfer has no effect.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
from jax.tree_util import KeyPath, keystr

from weft.errors import ForkError, RoleError
from weft.lifting.roles import (
    FORK,
    Role,
    Roles,
    broadcast_roles,
    carrier_roles,
    is_role,
)
from weft.typing import Fn, PyTree

Carrier = Any  # a scope, an object, a context: an instance of one of a kind's `carrier_types`
Group = PyTree  # the arrays of one group of a carrier's state, in a form that its kind chooses
Groups = tuple[
    Group, ...
]  # the groups of one carrier, one for each of its filters
StaticHalf = Any  # hashable: all that a kind knows of the carriers of a call besides arrays
Handle = Any  # what a kind keeps on one side of the transformation, from one stage to the next
Structure = Any  # a `PyTreeDef` of JAX, which is not a class for type checkers
Filter = Any  # selects state; each kind has filters of its own

Parts = tuple[tuple[Filter, Role], ...]
"""The groups of a carrier: for each a filter of its kind, and a role."""


class Returned(NamedTuple):
    """Result of a function, the carriers in it, and the parts of each."""

    result: PyTree
    carriers: list[Carrier]
    parts: list[Parts]


class Kind(Protocol):
    """Protocol of the transfer of one sort of carrier.

    `groups` has one pytree per filter of a carrier, in the filters' order.

    Attributes:
        carrier_types: classes of the carriers.
        carriers_are_leaves: whether carriers are leaves for JAX, not pytrees. Arguments without
            carriers are then recognized immediately, regardless of their number of leaves.
    """

    carrier_types: ClassVar[tuple[type, ...]]
    carriers_are_leaves: ClassVar[bool] = False

    def split(
        self, carriers: Sequence[Carrier], parts: Sequence[Parts]
    ) -> tuple[Handle, Hashable, list[Groups]]:
        """Splits all carriers of a call.

        Returns a handle for `commit`, the static half, and the groups of each carrier.
        """
        ...

    def merge(
        self, static: StaticHalf, groups: Sequence[Groups]
    ) -> tuple[Handle, list[Carrier]]:
        """Creates carriers from the arguments; returns a handle for `collect` and the carriers."""
        ...

    def collect(
        self,
        inner: Handle,
        static: StaticHalf,
        carriers: Sequence[Carrier],
        parts: Sequence[Parts],
        returned: Returned,
    ) -> tuple[Hashable, list[Groups], list[Groups]]:
        """Returns the groups of changed `carriers`, and of the carriers that are `returned`."""
        ...

    def commit(
        self,
        outer: Handle,
        static: StaticHalf,
        groups: Sequence[Groups],
        new_groups: Sequence[Groups],
    ) -> list[Carrier]:
        """Writes to the caller's carriers, all or nothing; returns those the call returned.

        A group that is None has no changes.
        """
        ...

    # Kinds with keys, axis metadata, counters, or functions that create state override these.

    def create_outside(
        self,
        carriers: Sequence[Carrier],
        parts: Sequence[Parts],
        call: Callable[[Sequence[Carrier]], PyTree],
    ) -> None:
        """Creates state of carriers that belong to an outer trace, before `split`.

        `call` calls the transformed function with other carriers.
        """

    def fork(self, group: Group, n: int) -> Group:
        """Splits each PRNG key of a group into `n`, along a new leading axis."""
        raise ForkError(
            f"{type(self).__name__} has no PRNG keys to fork; give the group an axis."
        )

    def axis(
        self,
        static: StaticHalf,
        carrier: int,
        sign: int,
        group: Group,
        axis: int,
        metadata: dict[Any, Any],
    ) -> Group:
        """Adds (`sign` 1) or removes (-1) an axis in a group's axis metadata."""
        return group

    def may_create(self, static: StaticHalf, where: Filter) -> bool:
        """Returns whether a call may create state in the group with the filter `where`."""
        return False

    def created(self, inputs: Group, outputs: Group) -> Group | None:
        """Returns the entries of a group that a call has created, with initial values, or None."""
        return None

    def union(self, group: Group, other: Group) -> Group:
        """Returns a group with the entries of another one, which replace its own."""
        return other

    def with_created(self, group: Group, created: Group) -> Group:
        """Returns a group of results with the initial values of entries created before."""
        return group

    def static_of_run(
        self,
        static: StaticHalf,
        created_by: StaticHalf = None,
        collected: StaticHalf = None,
    ) -> StaticHalf:
        """Returns the static half for a loop's body, which counts what runs before.

        Args:
            static: the static half of the call.
            created_by: what another run has collected that created the state of this one, if any.
            collected: what this run will collect, if known.
        """
        return static

    def join(
        self, static: StaticHalf, statics: Sequence[StaticHalf]
    ) -> StaticHalf:
        """Joins the static halves that branches have collected; one branch runs."""
        return statics[0]

    def location(
        self, static: StaticHalf, carrier: int | None, path: KeyPath
    ) -> str:
        """Returns the user's name for the location of an entry of a group, for errors.

        `carrier` is the index of the group's carrier; input carriers precede returned ones. It is
        None for another part of the arguments, with its path among these.
        """
        if carrier is not None:
            return f"the state{keystr(path)}"
        if not path:
            return "the input"
        argument, *path_in_argument = path
        return f"input {argument.idx}{keystr(tuple(path_in_argument))}"


def is_carrier(kind: Kind) -> Callable[[Any], bool]:
    """Returns a function of a leaf that tells whether it is a carrier of a kind."""
    carrier_types = kind.carrier_types
    return lambda leaf: isinstance(leaf, carrier_types)


@jax.tree_util.register_pytree_with_keys_class
class StateNode:
    """Carrier's groups, in the carrier's place."""

    def __init__(self, groups: Groups):
        self.groups = groups

    def tree_flatten(self) -> tuple[Groups, None]:
        return self.groups, None

    def tree_flatten_with_keys(self):
        keys = (jax.tree_util.SequenceKey(i) for i in range(len(self.groups)))
        return tuple(zip(keys, self.groups, strict=True)), None

    @classmethod
    def tree_unflatten(cls, aux: None, groups: Sequence[Group]) -> "StateNode":
        return cls(tuple(groups))


def is_state_node(x: PyTree) -> bool:
    """Returns whether `x` represents a carrier."""
    return isinstance(x, StateNode)


@jax.tree_util.register_static
class Static:
    """Hashable value as the structure of a pytree without leaves."""

    def __init__(self, value: Hashable):
        self.value: Any = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        # True, 1 and 1.0 are equal, but a function may distinguish them.
        return (
            isinstance(other, Static)
            and type(self.value) is type(other.value)
            and self.value == other.value
        )

    def __repr__(self) -> str:
        return repr(self.value)


class PureArgs(NamedTuple):
    """Input values of a pure function.

    Attributes:
        static: the kind's static half.
        roles: one role for each leaf of `packed`; a `StateNode` is a leaf.
        packed: the user's arguments, with a `StateNode` in place of each carrier.
    """

    static: Static
    roles: Static
    packed: PyTree


class PureResults(NamedTuple):
    """Output values of a pure function.

    Attributes:
        static: the static half that the kind has collected.
        state_nodes: the changes of each input carrier.
        packed: the user's results, with a `StateNode` in place of each returned carrier.
    """

    static: Static
    state_nodes: list[StateNode]
    packed: PyTree


class SelectedLeaves(NamedTuple):
    """Leaves of a tree; those at the positions `indices` are selected and can be replaced."""

    leaves: list[Any]
    structure: Structure
    indices: list[int]

    @classmethod
    def of(
        cls,
        tree: PyTree,
        is_selected: Callable[[Any], bool],
        is_leaf: Callable[[Any], bool] | None,
    ) -> "SelectedLeaves":
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
        indices: list[int] = []
        for i, leaf in enumerate(leaves):
            if is_selected(leaf):
                indices.append(i)
        return cls(leaves, structure, indices)

    @property
    def selected(self) -> list[Any]:
        return [self.leaves[i] for i in self.indices]

    def replace(self, values: Iterable[Any]) -> PyTree:
        """Returns the tree with other values in place of the selected leaves."""
        leaves = list(self.leaves)
        for i, value in zip(self.indices, values, strict=True):
            leaves[i] = value
        return self.structure.unflatten(leaves)


def split_args(
    kind: Kind,
    args: PyTree,
    roles: PyTree,
    roles_name: str = "in_axes",
    default_roles: Roles | None = None,
    call: Fn | None = None,
) -> tuple[Handle, PureArgs]:
    """Splits the carriers among `args` into groups, by their roles.

    Args:
        roles: a pytree prefix of `args`, see `weft.lifting.roles`.
        roles_name: the user's name of `roles`, for errors.
        default_roles: the roles of carriers to which `roles` gives None.
        call: the transformed function of `args`, for `Kind.create_outside`.

    Returns a handle for `commit`, which stays outside, and the crossing values.
    """
    is_carrier_leaf = is_carrier(kind)
    is_leaf = None if kind.carriers_are_leaves else is_carrier_leaf
    leaves, structure = jax.tree.flatten(args, is_leaf=is_leaf)
    if roles is None and kind.carriers_are_leaves:
        leaf_types = set(map(type, leaves))  # few, and there are many leaves
        types_in_args = [
            cls for cls in leaf_types if issubclass(cls, kind.carrier_types)
        ]
        if not types_in_args:
            outer, static, _ = kind.split([], [])
            return outer, PureArgs(
                Static(static), Static((None,) * len(leaves)), args
            )

    leaf_roles: list[Any] = [None] * len(leaves)
    if roles is not None:
        leaf_roles = broadcast_roles(roles, args, is_carrier_leaf, roles_name)
    carrier_indices: list[int] = []
    parts: list[Parts] = []
    for i, leaf in enumerate(leaves):
        role = leaf_roles[i]
        if is_carrier_leaf(leaf):
            if role is None and default_roles is not None:
                role = default_roles
            leaf_roles[i] = carrier_roles(role)
            carrier_indices.append(i)
            parts.append(tuple(leaf_roles[i]))
        elif isinstance(role, Roles):
            raise stateless_error(roles_name, role, leaf)

    arg_leaves = SelectedLeaves(leaves, structure, carrier_indices)
    carriers = arg_leaves.selected
    if call is not None:
        kind.create_outside(
            carriers, parts, lambda copies: call(*arg_leaves.replace(copies))
        )
    outer, static, groups = kind.split(carriers, parts)
    packed = arg_leaves.replace(map(StateNode, groups))
    return outer, PureArgs(Static(static), Static(tuple(leaf_roles)), packed)


def stateless_error(roles_name: str, role: Roles, leaf: PyTree) -> RoleError:
    """Returns the error for roles of state that are given to a value without state."""
    return RoleError(
        f"{roles_name} gives {role!r} to a {type(leaf).__name__}, which carries no state; give it "
        "an axis, a sharding or None."
    )


def call_pure(
    kind: Kind,
    fn: Fn,
    pure_args: PureArgs,
    out_roles: PyTree = None,
    has_kwargs: bool = False,
) -> PureResults:
    """Merges the carriers at the present trace level, calls `fn(*args)` and collects.

    The arguments are the tuple given to `split_args`, with new carriers; with `has_kwargs`, the
    last one is a dict of arguments by name. `out_roles` are the roles of carriers that `fn`
    returns, a pytree prefix of its result.
    """
    static = pure_args.static.value
    arg_leaves = SelectedLeaves.of(
        pure_args.packed, is_state_node, is_state_node
    )
    inner, carriers = kind.merge(
        static, [node.groups for node in arg_leaves.selected]
    )
    args = arg_leaves.replace(carriers)
    if has_kwargs:
        *args, kwargs = args
        result = fn(*args, **kwargs)
    else:
        result = fn(*args)

    is_carrier_leaf = is_carrier(kind)
    result_leaves = SelectedLeaves.of(result, is_carrier_leaf, is_carrier_leaf)
    returned = Returned(result, result_leaves.selected, [])
    if result_leaves.indices or not is_role(out_roles):
        leaf_roles = broadcast_roles(
            out_roles, result, is_carrier_leaf, "out_axes"
        )
        for role, leaf in zip(leaf_roles, result_leaves.leaves, strict=True):
            if is_carrier_leaf(leaf):
                returned.parts.append(tuple(carrier_roles(role)))
            elif isinstance(role, Roles):
                raise stateless_error("out_axes", role, leaf)

    parts = [tuple(pure_args.roles.value[i]) for i in arg_leaves.indices]
    collected, groups, new_groups = kind.collect(
        inner, static, carriers, parts, returned
    )
    state_nodes: list[StateNode] = []
    for carrier_parts, carrier_groups in zip(parts, groups, strict=True):
        # Forked keys are only for the new axis; the caller's keys are unchanged.
        left_groups: list[Group] = []
        for (_, role), group in zip(carrier_parts, carrier_groups, strict=True):
            left_groups.append(None if role is FORK else group)
        state_nodes.append(StateNode(tuple(left_groups)))
    packed = result_leaves.replace(map(StateNode, new_groups))
    return PureResults(Static(collected), state_nodes, packed)


def commit_results(kind: Kind, outer: Handle, results: PureResults) -> PyTree:
    """Writes changes to the caller's carriers and returns the function's own results."""
    static = results.static.value
    groups = [node.groups for node in results.state_nodes]
    result_leaves = SelectedLeaves.of(
        results.packed, is_state_node, is_state_node
    )
    if not result_leaves.indices:
        kind.commit(outer, static, groups, [])
        return results.packed
    new_groups = [node.groups for node in result_leaves.selected]
    new_carriers = kind.commit(outer, static, groups, new_groups)
    return result_leaves.replace(new_carriers)
