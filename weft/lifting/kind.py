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

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from weft.errors import ForkError, RoleError
from weft.lifting.roles import FORK, Roles, broadcast_roles, carrier_roles, is_role
from weft.typing import Fn


class Returned(NamedTuple):
    """Result of a function, the carriers in it, and the parts of each."""

    result: Any
    carriers: list[Any]
    parts: list["Parts"]


Parts = tuple[tuple[Any, Any], ...]
"""The groups of a carrier: for each a filter of its kind, and a role."""


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
        self, carriers: Sequence[Any], parts: Sequence[Parts]
    ) -> tuple[Any, Hashable, list[tuple[Any, ...]]]:
        """Splits all carriers of a call.

        Returns a handle for `commit`, the static half, and the groups of each carrier.
        """
        ...

    def merge(self, static: Any, groups: Sequence[tuple[Any, ...]]) -> tuple[Any, list[Any]]:
        """Creates carriers from the arguments; returns a handle for `collect` and the carriers."""
        ...

    def collect(
        self,
        inner: Any,
        static: Any,
        carriers: Sequence[Any],
        parts: Sequence[Parts],
        returned: Returned,
    ) -> tuple[Hashable, list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """Returns the groups of changed `carriers`, and of the carriers that are `returned`."""
        ...

    def commit(
        self,
        outer: Any,
        static: Any,
        groups: Sequence[tuple[Any, ...]],
        new_groups: Sequence[tuple[Any, ...]],
    ) -> list[Any]:
        """Writes to the caller's carriers, all or nothing; returns those the call returned.

        A group that is None has no changes.
        """
        ...

    # Kinds with keys, axis metadata, counters, or functions that create state override these.

    def create_outside(
        self, carriers: Sequence[Any], parts: Sequence[Parts], call: Callable[[Sequence[Any]], Any]
    ) -> None:
        """Creates state of carriers that belong to an outer trace, before `split`.

        `call` calls the transformed function with other carriers.
        """

    def fork(self, group: Any, n: int) -> Any:
        """Splits each PRNG key of a group into `n`, along a new leading axis."""
        raise ForkError(f"{type(self).__name__} has no PRNG keys to fork; give the group an axis.")

    def axis(
        self, static: Any, carrier: int, sign: int, group: Any, axis: int, metadata: dict[Any, Any]
    ) -> Any:
        """Adds (`sign` 1) or removes (-1) an axis in a group's axis metadata."""
        return group

    def may_create(self, static: Any, where: Any) -> bool:
        """Returns whether a call may create state in the group with the filter `where`."""
        return False

    def created(self, before: Any, after: Any) -> Any:
        """Returns the entries of a group that a call has created, with initial values, or None."""
        return None

    def union(self, group: Any, other: Any) -> Any:
        """Returns a group with the entries of another one, which replace its own."""
        return other

    def with_created(self, group: Any, created: Any) -> Any:
        """Returns a group of results with the initial values of entries created before."""
        return group

    def static_of_run(self, static: Any, created_by: Any = None, after: Any = None) -> Any:
        """Returns the static half for a loop's body, which counts what runs before.

        Args:
            static: the static half of the call.
            created_by: what another run has collected that created the state of this one, if any.
            after: what this run will collect, if known.
        """
        return static

    def join(self, static: Any, statics: Sequence[Any]) -> Any:
        """Joins the static halves that branches have collected; one branch runs."""
        return statics[0]

    def location(self, static: Any, carrier: int | None, path: Any) -> str:
        """Returns the user's name for the location of an entry of a group, for errors.

        `carrier` is the index of the group's carrier; input carriers precede returned ones. It is
        None for another part of the arguments, with its path among these.
        """
        if carrier is not None:
            return f"the state{keystr(path)}"
        return f"input {path[0].idx}{keystr(path[1:])}" if path else "the input"


def is_carrier(kind: Kind) -> Callable[[Any], bool]:
    """Returns a function of a leaf that tells whether it is a carrier of a kind."""
    carrier_types = kind.carrier_types
    return lambda leaf: isinstance(leaf, carrier_types)


def fold_keys(group: Any, index: Any) -> Any:
    """Returns the PRNG keys of a group for one iteration of a loop of unknown length.

    Raises ForkError for values that are not keys.
    """

    def folded(path: Any, key: Any) -> Any:
        is_key = jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.dtype == jnp.uint32
        if not is_key:
            raise ForkError(
                f"the value at {keystr(path)} is {jax.typeof(key).str_short()}, not a PRNG key, "
                "and cannot be split; share it or carry it."
            )
        return jax.random.fold_in(key, index)

    return jax.tree_util.tree_map_with_path(folded, group)


@jax.tree_util.register_pytree_with_keys_class
class StateNode:
    """Carrier's groups, in the carrier's place."""

    def __init__(self, groups: tuple[Any, ...]):
        self.groups = groups

    def tree_flatten(self):
        return self.groups, None

    def tree_flatten_with_keys(self):
        keys = (jax.tree_util.SequenceKey(i) for i in range(len(self.groups)))
        return tuple(zip(keys, self.groups, strict=True)), None

    @classmethod
    def tree_unflatten(cls, aux: None, groups: Sequence[Any]) -> "StateNode":
        return cls(tuple(groups))


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


@jax.tree_util.register_static
class StaticWithoutNew(Static):
    """Static half of a function that returned no carriers."""


def is_state_node(x: object) -> bool:
    """Returns whether `x` represents a carrier."""
    return isinstance(x, StateNode)


class PureArgs(NamedTuple):
    """Input values: `static` contains the kind's static half and one role per leaf of `packed`."""

    static: Static
    packed: Any


class PureResults(NamedTuple):
    """Output values: a static half, a `StateNode` per input carrier, and the function's results."""

    static: Static
    state_nodes: list[StateNode]
    packed: Any


class Leaves(NamedTuple):
    """Leaves of a tree; those at the positions `at` can be replaced."""

    every: list[Any]
    structure: Any
    at: list[int]

    @classmethod
    def of(
        cls, tree: object, is_picked: Callable[[Any], bool], is_leaf: Callable[[Any], bool] | None
    ) -> "Leaves":
        every, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
        return cls(every, structure, [i for i, x in enumerate(every) if is_picked(x)])

    @property
    def picked(self) -> list[Any]:
        return [self.every[i] for i in self.at]

    def filled(self, values: Iterable[Any]) -> Any:
        """Returns the tree with other values at these positions."""
        every = list(self.every)
        for i, x in zip(self.at, values, strict=True):
            every[i] = x
        return self.structure.unflatten(every)


def split_args(
    kind: Kind,
    args: Any,
    roles: object,
    what: str = "in_axes",
    of_carriers: Roles | None = None,
    call: Fn | None = None,
) -> tuple[Any, PureArgs]:
    """Splits the carriers among `args` into groups, by their roles.

    Args:
        roles: a pytree prefix of `args`, see `weft.lifting.roles`.
        what: the user's name of `roles`, for errors.
        of_carriers: the roles of carriers to which `roles` gives None.
        call: the transformed function of `args`, for `Kind.create_outside`.

    Returns a handle for `commit`, which stays outside, and the crossing values.
    """
    is_carrier_leaf = is_carrier(kind)
    opaque = kind.carriers_are_leaves
    leaves, tree = jax.tree.flatten(args, is_leaf=None if opaque else is_carrier_leaf)
    leaf_types = set(map(type, leaves))  # few, and there are many leaves
    has_carriers = any(issubclass(leaf_type, kind.carrier_types) for leaf_type in leaf_types)
    if roles is None and opaque and not has_carriers:
        outer, static, _ = kind.split([], [])
        return outer, PureArgs(Static((static, (None,) * len(leaves))), args)
    flat_roles: list[Any] = [None] * len(leaves)
    if roles is not None:
        flat_roles = broadcast_roles(roles, args, is_carrier_leaf, what)
    indices: list[int] = []
    parts: list[Parts] = []
    for i, leaf in enumerate(leaves):
        role = flat_roles[i]
        if is_carrier_leaf(leaf):
            if role is None and of_carriers is not None:
                role = of_carriers
            flat_roles[i] = carrier_roles(role)
            indices.append(i)
            parts.append(tuple(flat_roles[i]))
        elif isinstance(role, Roles):
            raise stateless_error(what, role, leaf)
    of_args = Leaves(leaves, tree, indices)
    if call is not None:
        kind.create_outside(of_args.picked, parts, lambda others: call(*of_args.filled(others)))
    outer, static, groups = kind.split(of_args.picked, parts)
    packed = of_args.filled(map(StateNode, groups))
    return outer, PureArgs(Static((static, tuple(flat_roles))), packed)


def stateless_error(what: str, role: Roles, leaf: object) -> RoleError:
    """Returns the error for roles of state that are given to a value without state."""
    return RoleError(
        f"{what} gives {role!r} to a {type(leaf).__name__}, which carries no state; give it an "
        "axis, a sharding or None."
    )


def call_pure(
    kind: Kind, fn: Fn, pure_args: PureArgs, out_roles: object = None, has_kwargs: bool = False
) -> PureResults:
    """Merges the carriers at the present trace level, calls `fn(*args)` and collects.

    The arguments are the tuple given to `split_args`, with new carriers; with `has_kwargs`, the
    last one is a dict of arguments by name. `out_roles` are the roles of carriers that `fn`
    returns, a pytree prefix of its result.
    """
    static, flat_roles = pure_args.static.value
    of_args = Leaves.of(pure_args.packed, is_state_node, is_state_node)
    inner, carriers = kind.merge(static, [state_node.groups for state_node in of_args.picked])
    args, kwargs = of_args.filled(carriers), {}
    if has_kwargs:
        *args, kwargs = args
    result = fn(*args, **kwargs)

    is_carrier_leaf = is_carrier(kind)
    of_result = Leaves.of(result, is_carrier_leaf, is_carrier_leaf)
    returned = Returned(result, of_result.picked, [])
    if of_result.at or not is_role(out_roles):
        flat_out_roles = broadcast_roles(out_roles, result, is_carrier_leaf, "out_axes")
        for role, leaf in zip(flat_out_roles, of_result.every, strict=True):
            if is_carrier_leaf(leaf):
                returned.parts.append(tuple(carrier_roles(role)))
            elif isinstance(role, Roles):
                raise stateless_error("out_axes", role, leaf)
    roles = [flat_roles[i] for i in of_args.at]
    out_static, groups, new_groups = kind.collect(
        inner, static, carriers, [tuple(of_carrier) for of_carrier in roles], returned
    )
    state_nodes: list[StateNode] = []
    for of_carrier, of_groups in zip(roles, groups, strict=True):
        # Forked keys are only for the new axis; the caller's keys are unchanged.
        left = [
            None if role is FORK else group
            for role, group in zip(of_carrier.roles, of_groups, strict=True)
        ]
        state_nodes.append(StateNode(tuple(left)))
    static_type = Static if of_result.at else StaticWithoutNew
    packed = of_result.filled(map(StateNode, new_groups))
    return PureResults(static_type(out_static), state_nodes, packed)


def commit_results(kind: Kind, outer: object, results: PureResults) -> Any:
    """Writes changes to the caller's carriers and returns the function's own results."""
    static, groups = results.static.value, [state_node.groups for state_node in results.state_nodes]
    if type(results.static) is StaticWithoutNew:
        kind.commit(outer, static, groups, [])
        return results.packed
    new = Leaves.of(results.packed, is_state_node, is_state_node)
    carriers = kind.commit(outer, static, groups, [node.groups for node in new.picked])
    return new.filled(carriers) if new.at else results.packed


@dataclasses.dataclass(frozen=True)
class UnitLayout:
    """Positions of units in a packed tree, with their roles and the sizes of `StateNode`s.

    `static` is the static half of the kind.
    """

    kind: Kind = dataclasses.field(compare=False)
    static: Hashable
    tree: Any
    sizes: tuple[int | None, ...]
    flat_roles: tuple[Any, ...]

    @functools.cached_property
    def of_units(self) -> tuple[list[Any], list[Any], list[int | None]]:
        """Returns the role of each unit, its filter, and the index of its carrier, or None."""
        roles, filters, carriers, count = [], [], [], itertools.count()
        for size, role in zip(self.sizes, self.flat_roles, strict=True):
            if size is None:
                roles.append(role)
                filters.append(None)
                carriers.append(None)
            else:
                of_carrier = carrier_roles(role)
                roles.extend(of_carrier.roles)
                filters.extend(of_carrier.filters)
                carriers.extend([next(count)] * size)
        return roles, filters, carriers


class Units:
    """Packed tree as a list of its parts with roles: groups of `StateNode`s, and other leaves.

    Attributes:
        filters: the filter of each group; None for another leaf.
        carriers: the index of each group's carrier; None for another leaf.
    """

    def __init__(self, layout: UnitLayout, values: Sequence[Any]):
        self.layout, self.values = layout, list(values)
        self.kind, self.static = layout.kind, layout.static
        self.roles, self.filters, self.carriers = layout.of_units

    @property
    def is_group(self) -> list[bool]:
        """Returns whether each is a group of a `StateNode`."""
        return [carrier is not None for carrier in self.carriers]

    @classmethod
    def of_packed(
        cls, kind: Kind, static: Any, packed: object, flat_roles: Sequence[Any]
    ) -> "Units":
        leaves, tree = jax.tree.flatten(packed, is_leaf=is_state_node)
        sizes, values = [], []
        for leaf in leaves:
            is_carrier = is_state_node(leaf)
            sizes.append(len(leaf.groups) if is_carrier else None)
            values.extend(leaf.groups if is_carrier else (leaf,))
        return cls(UnitLayout(kind, static, tree, tuple(sizes), tuple(flat_roles)), values)

    @classmethod
    def of_pure_args(cls, kind: Kind, pure_args: PureArgs) -> "Units":
        static, flat_roles = pure_args.static.value
        return cls.of_packed(kind, static, pure_args.packed, flat_roles)

    def of_results(self, results: PureResults, out_roles: object) -> "Units":
        """Returns the units of the results of a call; input carriers keep their roles."""
        carried = [role for role in self.layout.flat_roles if isinstance(role, Roles)]
        out = broadcast_roles(out_roles, results.packed, is_state_node, "out_axes")
        packed = results.state_nodes, results.packed
        return Units.of_packed(self.kind, self.static, packed, [*carried, *out])

    def packed(self) -> Any:
        rest = iter(self.values)
        return self.layout.tree.unflatten(
            [
                next(rest) if size is None else StateNode(tuple(itertools.islice(rest, size)))
                for size in self.layout.sizes
            ]
        )

    def pure_args(self) -> PureArgs:
        """Returns the crossing values."""
        return PureArgs(Static((self.static, self.layout.flat_roles)), self.packed())

    def with_static(self, static: Any) -> "Units":
        """Returns the same units with another static half of the kind."""
        return Units(dataclasses.replace(self.layout, static=static), self.values)

    def with_values(self, values: Sequence[Any]) -> "Units":
        """Returns the same units with other values."""
        return Units(self.layout, values)

    def mapped(self, fn: Callable[[Any, Any], Any]) -> "Units":
        """Returns the same units with the values that `fn` returns for each value and its role."""
        return self.with_values([fn(value, role) for value, role in self.pairs()])

    def without_values(self) -> "Units":
        """Returns the same units without values, for a function that outlives the call."""
        return self.with_values([None] * len(self.values))

    def location(self, i: int, leaf: int | None = None, of_results: bool = False) -> str:
        """Returns the location of the i-th value, or of its leaf with that number, for errors."""
        path = self._path(i, leaf)
        if (carrier := self.carriers[i]) is not None:
            return self.kind.location(self.static, carrier, path)
        return (
            f"the result{keystr(path[1:])}"
            if of_results
            else self.kind.location(self.static, None, path)
        )

    def location_in_groups(self, path: Any) -> str:
        """Returns a location by its JAX path in a list of all groups, for errors."""
        carriers = [carrier for carrier in self.carriers if carrier is not None]
        return self.kind.location(self.static, carriers[path[0].idx], path[1:])

    def _path(self, i: int, leaf: int | None) -> tuple[Any, ...]:
        """Returns the JAX path of a group's entry in the group, of others in the packed tree."""
        path = () if leaf is None else tree_leaves_with_path(self.values[i])[leaf][0]
        if self.carriers[i] is not None:
            return path
        sizes = [1 if size is None else size for size in self.layout.sizes]
        n = next(n for n in range(len(sizes)) if sum(sizes[: n + 1]) > i)
        at = tree_leaves_with_path(self.layout.tree.unflatten(range(len(sizes))))
        return (*at[n][0], *path)

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yields each value with its role."""
        return zip(self.values, self.roles, strict=True)

    def groups(self) -> list[tuple[Any, Any]]:
        """Returns each group with its role."""
        return [p for p, is_group in zip(self.pairs(), self.is_group, strict=True) if is_group]

    def values_with_role(self, role: object) -> list[Any]:
        """Returns the values with the role `role`, those of carriers first."""
        return [self.values[i] for i in self.indices_with_role(role)]

    def indices_with_role(self, role: object) -> list[int]:
        """Returns the indices of these values."""
        places = [i for i, r in enumerate(self.roles) if r is role]
        return sorted(places, key=lambda i: not self.is_group[i])

    def with_role_replaced(self, role: object, replacements: Sequence[Any]) -> "Units":
        """Returns the units with other values of that role, in the order of `values_with_role`."""
        values = list(self.values)
        for i, value in zip(self.indices_with_role(role), replacements, strict=True):
            values[i] = value
        return self.with_values(values)
