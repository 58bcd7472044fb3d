"""Mapped functions: over an axis with mapped, shared or forked state, or with mapped state alone.

vmap, pmap and shard_map map over an axis; map_state changes the state that a function sees.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

from weft.errors import AxisSizeError, TransformArgumentError, VariableAxisError
from weft.lifting import axes
from weft.lifting.kind import (
    Group,
    Groups,
    Kind,
    PureResults,
    StateNode,
    Static,
    call_pure,
    commit_results,
    is_state_node,
    split_args,
)
from weft.lifting.roles import FORK, Role
from weft.lifting.signature import named_after
from weft.lifting.state_creation import TracedFunction, final_results
from weft.lifting.units import Units
from weft.typing import Fn, PyTree, Tensor


def vmap(
    kind: Kind,
    fn: Fn,
    *,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    axis_size: int | None = None,
    axis_name: Hashable = None,
    spmd_axis_name: Hashable = None,
    metadata: axes.Metadata | None = None,
) -> Fn:
    """Applies `jax.vmap` to a function that takes carriers.

    Args:
        in_axes: a prefix of the arguments: an axis, None, or `Roles` for a carrier.
        out_axes: a prefix of the results, in the same form. Input carriers keep their roles.
        axis_size: size of the new axis, if no argument determines it.
        axis_name: name of the new axis for collectives.
        spmd_axis_name: mesh axis over which the new axis is laid out.
        metadata: passed to axis metadata that gains or loses the axis.

    Raises:
        AxisSizeError: if the mapped axes do not agree.
        RoleError: for a role other than an axis, None or FORK.
        VariableAxisError: if a value with the axis None differs between indices.
    """
    metadata = metadata or {}

    # Keys have been split along a new first axis, and the caller's keys stay as they are.
    def input_axis(_: PyTree, role: Role) -> PyTree:
        return 0 if role is FORK else role

    def output_axis(role: Role) -> PyTree:
        return None if role is FORK else role

    def call(*args: PyTree) -> PyTree:
        outer, pure_args = split_args(kind, args, in_axes, call=call)
        units = Units.of_pure_args(kind, pure_args)
        axes.check_roles(units, "vmap", (FORK,))
        n, entered = axes.enter_axis(units, axis_size, "vmap", metadata)
        has_returned = False

        def mapped(packed: PyTree) -> PureResults:
            nonlocal has_returned
            results = call_pure(
                kind, fn, pure_args._replace(packed=packed), out_axes
            )
            has_returned = True
            return results

        options: dict[str, Any] = {
            "in_axes": (units.mapped(input_axis).packed(),),
            "axis_size": n,
            "axis_name": axis_name,
            "spmd_axis_name": spmd_axis_name,
        }
        result_axes = axes.out_axes_of_results(units, out_axes, output_axis)
        named_after(fn, mapped)
        try:
            results = jax.vmap(mapped, out_axes=result_axes, **options)(
                entered.packed()
            )
        except ValueError:
            # JAX only finds after the run that a result without an axis differs between indices.
            if has_returned:
                batched = jax.vmap(mapped, out_axes=0, **options)
                _check_shared_results(fn, batched, entered, out_axes)
            raise
        results = axes.leave_axis(units, results, out_axes, metadata)
        return commit_results(kind, outer, results)

    return call


def _check_shared_results(
    fn: Fn,
    batched: Callable[[PyTree], PureResults],
    entered: Units,
    out_axes: PyTree,
) -> None:
    """Raises VariableAxisError if a result without an axis depends on an input with one.

    `batched` stacks all results.
    """
    is_mapped_input: list[bool] = []
    for unit, value in entered.items():
        is_mapped_input += [unit.role is not None] * len(jax.tree.leaves(value))
    traced = TracedFunction(fn, batched, entered.packed())
    results = entered.of_results(traced.shapes, out_axes)
    n_leaves = 0
    for i, (unit, value) in enumerate(results.items()):
        for number, _ in enumerate(jax.tree.leaves(value)):
            is_used_input = traced.used_inputs([n_leaves])
            n_leaves += 1
            inputs = zip(is_used_input, is_mapped_input, strict=True)
            is_same_for_all = not any(
                is_used and is_mapped for is_used, is_mapped in inputs
            )
            if not isinstance(unit.role, int) and not is_same_for_all:
                raise VariableAxisError(
                    f"vmap: {results.location(i, number)} is declared to be the same for all, with "
                    "the axis None, but it differs from one index to the next; give it an axis. A "
                    "variable that is made of random numbers is the same for all if its PRNG "
                    "stream is not split."
                ) from None


def shard_map(
    kind: Kind,
    fn: Fn,
    *,
    mesh: Mesh | AbstractMesh,
    in_specs: PyTree,
    out_specs: PyTree,
    axis_names: frozenset[str] = frozenset(),
    check_vma: bool = True,
) -> Fn:
    """Applies `jax.shard_map` to a function that takes carriers.

    Args:
        in_specs: a prefix of the arguments: a `PartitionSpec`, or `Roles` for a carrier. There, the
            role of a group is a `PartitionSpec`, which also applies to the results, or FORK for
            separate keys of each device.
        axis_names: mesh axes that `fn` sees; by default all.
    """
    names = tuple(axis_names or mesh.axis_names)
    n_devices = int(np.prod([mesh.shape[name] for name in names]))

    def fork_keys(value: PyTree, role: Role) -> PyTree:
        if role is not FORK:
            return value
        return _shard_keys(kind.fork(value, n_devices), mesh, names)

    def take_key(value: PyTree, role: Role) -> PyTree:
        if role is not FORK:
            return value
        return jax.tree.map(lambda keys: keys[0], value)

    def input_spec(_: PyTree, role: Role) -> PyTree:
        return PartitionSpec(names) if role is FORK else role

    def output_spec(role: Role) -> PartitionSpec:
        return role if isinstance(role, PartitionSpec) else PartitionSpec()

    def call(*args: PyTree) -> PyTree:
        outer, pure_args = split_args(
            kind, args, in_specs, "in_specs", call=call
        )
        units = Units.of_pure_args(kind, pure_args)

        def on_device(packed: PyTree) -> PureResults:
            device_units = Units.of_pure_args(
                kind, pure_args._replace(packed=packed)
            )
            device_args = device_units.mapped(take_key).pure_args()
            return call_pure(kind, fn, device_args, out_specs)

        mapped = jax.shard_map(
            named_after(fn, on_device),
            mesh=mesh,
            in_specs=(units.mapped(input_spec).packed(),),
            out_specs=axes.out_axes_of_results(units, out_specs, output_spec),
            axis_names=frozenset(names),
            check_vma=check_vma,
        )
        results = mapped(units.mapped(fork_keys).packed())
        return commit_results(kind, outer, results)

    return call


def _shard_keys(
    keys: Group, mesh: Mesh | AbstractMesh, names: tuple[str, ...]
) -> Group:
    """Lays out keys, one for each device, as JAX requires for explicit axes of a mesh."""
    axis_types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit_names = tuple(
        name for name in names if axis_types[name] is AxisType.Explicit
    )
    if not explicit_names:
        return keys
    return jax.sharding.reshard(
        keys, NamedSharding(mesh, PartitionSpec(explicit_names))
    )


def pmap(
    kind: Kind,
    fn: Fn,
    *,
    axis_name: str = "devices",
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    devices: Sequence[Any] | None = None,
    metadata: axes.Metadata | None = None,
) -> Fn:
    """Runs a function on several devices, each with one index of the mapped axes.

    Args:
        in_axes, out_axes, metadata: see `vmap`, with axes from 0.
        devices: by default as many of `jax.devices()` as needed.

    Raises:
        AxisSizeError: if the mapped axes do not agree, or there are too few devices.
        TransformArgumentError: for a mesh with explicit axes, or inside `shard_map` or `pmap`.
    """
    metadata = metadata or {}

    def spec(role: Role) -> PartitionSpec:
        if role is None:
            return PartitionSpec()
        # Keys have been split along a new first axis.
        axis = role if isinstance(role, int) else 0
        return PartitionSpec(*(None,) * axis, axis_name)

    def call(*args: PyTree) -> PyTree:
        _check_context()
        outer, pure_args = split_args(kind, args, in_axes, call=call)
        units = Units.of_pure_args(kind, pure_args)
        axes.check_roles(units, "pmap", (FORK,))
        size = None if devices is None else len(devices)
        n, entered = axes.enter_axis(units, size, "pmap", metadata)
        available_devices = jax.devices() if devices is None else devices
        if n > len(available_devices):
            raise AxisSizeError(
                f"pmap: the mapped axes have size {n}, and there are {len(available_devices)} "
                "devices; each index needs one. Map over fewer, or use vmap for what one device "
                "can do alone."
            )
        mesh = Mesh(np.asarray(available_devices[:n]), (axis_name,))

        def on_device(values: list[PyTree]) -> PureResults:
            inside = units.with_values(values).mapped(_squeeze_axis)
            results = call_pure(kind, fn, inside.pure_args(), out_axes)
            returned = units.of_results(results, out_axes).mapped(_expand_axis)
            state_nodes, packed = returned.packed()
            return PureResults(results.static, state_nodes, packed)

        in_specs = [spec(unit.role) for unit in units.layout.units]
        mapped = jax.shard_map(
            named_after(fn, on_device),
            mesh=mesh,
            in_specs=(in_specs,),
            out_specs=axes.out_axes_of_results(units, out_axes, spec),
            check_vma=False,
        )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            values: list[PyTree] = []
            for value, in_spec in zip(entered.values, in_specs, strict=True):
                values.append(_put_on_mesh(value, NamedSharding(mesh, in_spec)))
            results = jax.jit(named_after(fn, mapped))(values)
        results = axes.leave_axis(units, results, out_axes, metadata)
        return commit_results(kind, outer, results)

    return call


def _check_context() -> None:
    """Rejects a context mesh under which results of another mesh cannot be used."""
    context = jax.sharding.get_abstract_mesh()
    axis_types = {
        kind.name.lower()
        for kind in context.axis_types
        if kind is not AxisType.Auto
    }
    if axis_types:
        raise TransformArgumentError(
            f"pmap uses a mesh of its own, and the mesh in the context has the "
            f"{' and '.join(sorted(axis_types))} axes {context.axis_names}; call pmap outside of "
            "jax.set_mesh, shard_map and pmap, or use shard_map with that mesh, or vmap with "
            "spmd_axis_name."
        )


def _put_on_mesh(value: PyTree, sharding: NamedSharding) -> PyTree:
    replicated = NamedSharding(sharding.mesh, PartitionSpec())

    def put_leaf(leaf: Tensor) -> Tensor:
        if not isinstance(leaf, jax.core.Tracer):
            return jax.device_put(leaf, sharding)
        leaf_sharding = getattr(jax.typeof(leaf), "sharding", None)
        mesh = getattr(leaf_sharding, "mesh", None)
        if mesh is None or AxisType.Explicit not in mesh.axis_types:
            return leaf
        # Under `jax.vmap` there are more axes than the type says, so none of them is named.
        return jax.device_put(leaf, replicated)

    return jax.tree.map(put_leaf, value)


def _squeeze_axis(value: PyTree, role: Role) -> PyTree:
    """Removes the mapped axis, which has the size 1 on each device."""
    if role is None:
        return value
    axis = role if isinstance(role, int) else 0
    return jax.tree.map(lambda x: jnp.squeeze(x, axis), value)


def _expand_axis(value: PyTree, role: Role) -> PyTree:
    if not isinstance(role, int):
        return value
    return jax.tree.map(lambda x: jnp.expand_dims(x, role), value)


def map_state(
    kind: Kind,
    fn: Fn,
    *,
    in_axes: PyTree = None,
    map_in: Callable[[Groups], Groups] | None = None,
    map_out: Callable[[Groups, Groups, bool], Groups] | None = None,
    initialize: Callable[[Groups, Groups], Groups] | None = None,
    is_first: Callable[..., bool] = lambda *args: True,
) -> Fn:
    """Maps the state of carriers that a function sees.

    With `initialize`, the function runs twice, as state that it creates has to be mapped, too:

        groups -> fn -> initialize -> map_in -> fn -> map_out -> commit

    Args:
        in_axes: a prefix of the arguments; only the filters of `Roles` are used.
        map_in: from the groups of a carrier to those that `fn` sees; by default the same.
        map_out: from the groups before and after `fn`, and whether `initialize` was called, to
            those written to the carrier; by default the groups after `fn`.
        initialize: if given, `fn` first runs on the unmapped groups; maps the groups before and
            after that run to those of the carrier.
        is_first: returns for the arguments of a call whether `initialize` is needed.
    """

    def call(*args: PyTree) -> PyTree:
        outer, pure_args = split_args(kind, args, in_axes, call=call)
        carrier_groups = _groups_of(pure_args.packed)
        initial_groups = carrier_groups
        initializes = initialize is not None and is_first(*args)
        if initialize is not None and initializes:
            results = call_pure(kind, fn, pure_args)
            changed_groups = [node.groups for node in results.state_nodes]
            initial_groups = list(
                map(initialize, carrier_groups, changed_groups)
            )
            static = kind.static_of_run(
                pure_args.static.value, results.static.value
            )
            pure_args = pure_args._replace(static=Static(static))

        mapped_groups = initial_groups
        if map_in is not None:
            mapped_groups = list(map(map_in, initial_groups))
        packed = _with_groups(pure_args.packed, mapped_groups)
        results = call_pure(kind, fn, pure_args._replace(packed=packed))
        if map_out is not None:
            state_nodes: list[StateNode] = []
            for groups, node in zip(
                mapped_groups, results.state_nodes, strict=True
            ):
                state_nodes.append(
                    StateNode(map_out(groups, node.groups, initializes))
                )
            results = results._replace(state_nodes=state_nodes)

        # State that the first run has created consists of initial values.
        created: list[Group | None] = []
        for groups, new_groups in zip(
            carrier_groups, initial_groups, strict=True
        ):
            for group, new_group in zip(groups, new_groups, strict=True):
                created.append(None if new_group is group else new_group)
        return commit_results(
            kind, outer, final_results(kind, results, created)
        )

    return call


def _groups_of(packed: PyTree) -> list[Groups]:
    """Returns the groups of each carrier in packed arguments."""
    leaves = jax.tree.leaves(packed, is_leaf=is_state_node)
    return [leaf.groups for leaf in leaves if is_state_node(leaf)]


def _with_groups(packed: PyTree, groups: Sequence[Groups]) -> PyTree:
    """Returns packed arguments with other groups of each carrier."""
    new_groups = iter(groups)
    return jax.tree.map(
        lambda leaf: (
            StateNode(next(new_groups)) if is_state_node(leaf) else leaf
        ),
        packed,
        is_leaf=is_state_node,
    )
