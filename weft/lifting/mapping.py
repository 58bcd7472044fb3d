"""Mapped functions: over an axis with mapped, shared or forked state, or with mapped state alone.

vmap, pmap and shard_map map over an axis; map_state changes the state that a function sees.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from weft.errors import AxisSizeError, TransformArgumentError, VariableAxisError
from weft.lifting import axes, signature, state_creation
from weft.lifting import kind as kind_lib
from weft.lifting.kind import Kind, PureArgs, PureResults, StateNode, Static, Units
from weft.lifting.roles import FORK
from weft.typing import Fn


def vmap(
    kind: Kind,
    fn: Fn,
    *,
    in_axes: object = 0,
    out_axes: object = 0,
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

    def call(*args: object) -> Any:
        outer, pure_args = kind_lib.split_args(kind, args, in_axes, call=call)
        units = Units.of_pure_args(kind, pure_args)
        axes.check_roles(units, "vmap", (FORK,))
        n, entered = axes.enter_axis(units, axis_size, "vmap", metadata)

        structure: list[Any] = []

        def mapped(packed: object) -> PureResults:
            results = kind_lib.call_pure(kind, fn, PureArgs(pure_args.static, packed), out_axes)
            structure[:] = [jax.tree.structure(results)]
            return results

        batched = jax.vmap(
            signature.named_after(fn, mapped),
            in_axes=(units.mapped(lambda _, r: 0 if r is FORK else r).packed(),),
            out_axes=axes.out_axes_of_results(units, out_axes, lambda r: None if r is FORK else r),
            axis_size=n,
            axis_name=axis_name,
            spmd_axis_name=spmd_axis_name,
        )
        try:
            results = batched(entered.packed())
        except ValueError as error:
            # JAX detects and locates it after the function ran.
            if found := re.search(r"out_axes(\..+?), got axis spec None but output", str(error)):
                at = _location_of_result(units, out_axes, structure[0], found[1])
                raise VariableAxisError(
                    f"vmap: {at} is declared to be the same for all, with the axis None, but "
                    "it differs from one index to the next; give it an axis. A variable that is "
                    "made of random numbers is the same for all if its PRNG stream is not split."
                ) from None
            raise
        return kind_lib.commit_results(
            kind, outer, axes.leave_axis(units, results, out_axes, metadata)
        )

    return call


def _location_of_result(units: Units, out_axes: Any, structure: Any, shown: str) -> str:
    results = structure.unflatten(range(structure.num_leaves))
    number = next(
        n
        for path, n in jax.tree_util.tree_leaves_with_path(results)
        if jax.tree_util.keystr(path) == shown
    )
    returned = units.of_results(results, out_axes)
    i, leaf = next(
        (i, jax.tree.leaves(value).index(number))
        for i, value in enumerate(returned.values)
        if number in jax.tree.leaves(value)
    )
    return returned.location(i, leaf, of_results=True)


def shard_map(
    kind: Kind,
    fn: Fn,
    *,
    mesh: Mesh | jax.sharding.AbstractMesh,
    in_specs: object,
    out_specs: object,
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
    n = int(np.prod([mesh.shape[name] for name in names]))

    def call(*args: object) -> Any:
        outer, pure_args = kind_lib.split_args(kind, args, in_specs, "in_specs", call=call)
        units = Units.of_pure_args(kind, pure_args)

        def of_device(packed: object) -> PureResults:
            parts = Units.of_pure_args(kind, PureArgs(pure_args.static, packed))
            local = parts.mapped(
                lambda value, r: jax.tree.map(lambda x: x[0], value) if r is FORK else value
            )
            return kind_lib.call_pure(kind, fn, local.pure_args(), out_specs)

        mapped = jax.shard_map(
            signature.named_after(fn, of_device),
            mesh=mesh,
            in_specs=(
                units.mapped(lambda _, r: PartitionSpec(names) if r is FORK else r).packed(),
            ),
            out_specs=axes.out_axes_of_results(
                units, out_specs, lambda r: r if isinstance(r, PartitionSpec) else PartitionSpec()
            ),
            axis_names=frozenset(names),
            check_vma=check_vma,
        )

        entered = units.mapped(
            lambda value, r: _shard_keys(kind.fork(value, n), mesh, names) if r is FORK else value
        )
        return kind_lib.commit_results(kind, outer, mapped(entered.packed()))

    return call


def pmap(
    kind: Kind,
    fn: Fn,
    *,
    axis_name: str = "devices",
    in_axes: object = 0,
    out_axes: object = 0,
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

    def call(*args: object) -> Any:
        _check_context()
        outer, pure_args = kind_lib.split_args(kind, args, in_axes, call=call)
        units = Units.of_pure_args(kind, pure_args)
        axes.check_roles(units, "pmap", (FORK,))
        size = None if devices is None else len(devices)
        n, entered = axes.enter_axis(units, size, "pmap", metadata)
        there = jax.devices() if devices is None else devices
        if n > len(there):
            raise AxisSizeError(
                f"pmap: the mapped axes have size {n}, and there are {len(there)} devices; each "
                "index needs one. Map over fewer, or use vmap for what one device can do alone."
            )
        mesh = Mesh(np.asarray(there[:n]), (axis_name,))

        def of_device(values: list[Any]) -> PureResults:
            inside = units.with_values(values).mapped(_squeeze_axis)
            results = kind_lib.call_pure(kind, fn, inside.pure_args(), out_axes)
            returned = units.of_results(results, out_axes).mapped(_expand_axis)
            return PureResults(results.static, *returned.packed())

        mapped = jax.shard_map(
            signature.named_after(fn, of_device),
            mesh=mesh,
            in_specs=([_spec(role, axis_name) for role in units.roles],),
            out_specs=axes.out_axes_of_results(units, out_axes, lambda r: _spec(r, axis_name)),
            check_vma=False,
        )
        shardings = [NamedSharding(mesh, _spec(role, axis_name)) for role in units.roles]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            values = [_put_on_mesh(*pair) for pair in zip(entered.values, shardings, strict=True)]
            results = jax.jit(signature.named_after(fn, mapped))(values)
        return kind_lib.commit_results(
            kind, outer, axes.leave_axis(units, results, out_axes, metadata)
        )

    return call


def _check_context() -> None:
    """Rejects a context mesh under which results of another mesh cannot be used."""
    context = jax.sharding.get_abstract_mesh()
    kinds = {kind.name.lower() for kind in context.axis_types if kind is not AxisType.Auto}
    if kinds:
        raise TransformArgumentError(
            f"pmap uses a mesh of its own, and the mesh in the context has the "
            f"{' and '.join(sorted(kinds))} axes {context.axis_names}; call pmap outside of "
            "jax.set_mesh, shard_map and pmap, or use shard_map with that mesh, or vmap with "
            "spmd_axis_name."
        )


def _shard_keys(
    keys: object, mesh: Mesh | jax.sharding.AbstractMesh, names: tuple[str, ...]
) -> Any:
    """Lays out keys, one for each device, as JAX requires for explicit axes of a mesh."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = tuple(name for name in names if types[name] is AxisType.Explicit)
    if not explicit:
        return keys
    return jax.sharding.reshard(keys, NamedSharding(mesh, PartitionSpec(explicit)))


def _put_on_mesh(value: object, sharding: NamedSharding) -> Any:
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())

    def moved(x: object) -> Any:
        if not isinstance(x, jax.core.Tracer):
            return jax.device_put(x, sharding)
        mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
        if mesh is None or AxisType.Explicit not in mesh.axis_types:
            return x
        # Under `jax.vmap` there are more axes than the type says, so none of them is named.
        return jax.device_put(x, everywhere)

    return jax.tree.map(moved, value)


def _spec(role: Any, axis_name: str) -> PartitionSpec:
    if role is FORK:
        return PartitionSpec(axis_name)
    return PartitionSpec() if role is None else PartitionSpec(*(None,) * role, axis_name)


def _squeeze_axis(value: Any, role: Any) -> Any:
    if role is None:
        return value
    return jax.tree.map(lambda x: jnp.squeeze(x, 0 if role is FORK else role), value)


def _expand_axis(value: object, role: object) -> Any:
    return (
        jax.tree.map(lambda x: jnp.expand_dims(x, role), value) if isinstance(role, int) else value
    )


Groups = tuple[Any, ...]


def map_state(
    kind: Kind,
    fn: Fn,
    *,
    in_axes: object = None,
    map_in: Callable[[Groups], Groups] = lambda groups: groups,
    map_out: Callable[[Groups, Groups, bool], Groups] = lambda found, left, initializes: left,
    initialize: Callable[[Groups, Groups], Groups] | None = None,
    is_first: Callable[..., bool] = lambda *args: True,
) -> Fn:
    """Maps the state of carriers that a function sees.

    Args:
        in_axes: a prefix of the arguments; only the filters of `Roles` are used.
        map_in: from the groups of a carrier to those that `fn` sees.
        map_out: from the groups before and after `fn`, and whether `initialize` was called, to
            those written to the carrier.
        initialize: if given, `fn` first runs on the unmapped groups; maps the groups before and
            after that run to those of the carrier.
        is_first: returns for the arguments of a call whether `initialize` is needed.
    """

    def call(*args: object) -> Any:
        outer, pure_args = kind_lib.split_args(kind, args, in_axes, call=call)
        before = _groups_of(pure_args.packed)
        initializes = False
        if initialize is not None and is_first(*args):
            initializes = True
            results = kind_lib.call_pure(kind, fn, pure_args)
            initial = iter(map(initialize, before, _groups_of(results.state_nodes)))
            static, roles = pure_args.static.value
            static = Static((kind.static_of_run(static, results.static.value), roles))
            packed = _map_state_nodes(lambda _: next(initial), pure_args.packed)
            pure_args = PureArgs(static, packed)
        found = _map_state_nodes(map_in, pure_args.packed)
        results = kind_lib.call_pure(kind, fn, pure_args._replace(packed=found))
        pairs = zip(_groups_of(found), _groups_of(results.state_nodes), strict=True)
        left = [StateNode(map_out(of, after, initializes)) for of, after in pairs]
        results = results._replace(state_nodes=left)
        # State created before the second run consists of initial values.
        started = itertools.chain(*_groups_of(pure_args.packed))
        pairs = zip(itertools.chain(*before), started, strict=True)
        made = [new if new is not old else None for old, new in pairs]
        return kind_lib.commit_results(
            kind, outer, state_creation.final_results(kind, results, made)
        )

    return call


def _groups_of(packed: object) -> list[Groups]:
    leaves = jax.tree.leaves(packed, is_leaf=kind_lib.is_state_node)
    return [leaf.groups for leaf in leaves if kind_lib.is_state_node(leaf)]


def _map_state_nodes(fn: Callable[[Groups], Groups], tree: object) -> Any:
    return jax.tree.map(
        lambda x: StateNode(fn(x.groups)) if kind_lib.is_state_node(x) else x,
        tree,
        is_leaf=kind_lib.is_state_node,
    )
