"""Mapped functions of scopes: vmap, pmap and shard_map."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from weft import lifting
from weft.core.lift.common import Fn, roles_of, spread, taking_all
from weft.core.scope_kind import ScopeKind, Select
from weft.lifting import FORK, Roles


def vmap(
    fn: Fn,
    variable_axes: Mapping[Any, int | None],
    split_rngs: Mapping[Any, bool],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_size: int | None = None,
    axis_name: Any = None,
    spmd_axis_name: Any = None,
    metadata_params: Mapping[Any, Any] = {},
) -> Fn:
    """Applies `jax.vmap` to `fn(scope, *args)`.

    Args:
        variable_axes: by filter of collections, the mapped axis, or None for shared variables.
        split_rngs: by filter of PRNG streams, whether each index has its own keys.
        in_axes: see `jax.vmap`, for `args`; keyword arguments are mapped over axis 0.
        axis_size: size of the new axis, if no mapped value determines it.
        axis_name: name of the new axis for collectives.
        spmd_axis_name: mesh axis over which the new axis is laid out.
        metadata_params: passed to axis metadata that gains or loses the axis.

    Example:
        >>> from weft.core import init, lift, nn
        >>> dense = lift.vmap(nn.dense, {"params": 0}, {"params": True}, in_axes=(0, None))
        >>> y, variables = init(dense)(jax.random.key(0), jax.numpy.ones((5, 3)), 2)
        >>> y.shape, variables["params"]["kernel"].shape
        ((5, 2), (5, 3, 2))
    """
    lifted = lifting.vmap(
        ScopeKind("vmap"),
        spread(fn),
        in_axes=(roles_of(variable_axes, split_rngs), in_axes, 0),
        out_axes=out_axes,
        axis_size=axis_size,
        axis_name=axis_name,
        spmd_axis_name=spmd_axis_name,
        metadata=dict(metadata_params),
    )
    return taking_all(fn, lifted)


def pmap(
    fn: Fn,
    variable_axes: Mapping[Any, int | None],
    split_rngs: Mapping[Any, bool],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: str = "devices",
    devices: Sequence[Any] | None = None,
    metadata_params: Mapping[Any, Any] = {},
) -> Fn:
    """Applies `vmap` with one device for each index, by default the first of `jax.devices()`.

    Mapped axes count from 0. Raises AxisSizeError if there are fewer devices than indices.
    """
    lifted = lifting.pmap(
        ScopeKind("pmap"),
        spread(fn),
        in_axes=(roles_of(variable_axes, split_rngs), in_axes, 0),
        out_axes=out_axes,
        axis_name=axis_name,
        devices=devices,
        metadata=dict(metadata_params),
    )
    return taking_all(fn, lifted)


def shard_map(
    fn: Fn,
    variable_specs: Mapping[Any, Any],
    split_rngs: Mapping[Any, bool],
    *,
    mesh: Any,
    in_specs: Any,
    out_specs: Any,
    axis_names: frozenset[str] = frozenset(),
    check_vma: bool = True,
) -> Fn:
    """Applies `jax.shard_map` to `fn(scope, *args)`.

    Args:
        fn: the function, of one device's shards.
        variable_specs: by filter of collections, the `PartitionSpec` of the variables.
        split_rngs: by filter of PRNG streams, whether each device has its own keys.
        axis_names: mesh axes that `fn` sees; by default all.
    """
    spec = jax.sharding.PartitionSpec()
    roles = Roles(
        (
            *((Select(where), spec) for where, spec in variable_specs.items()),
            *((Select(rngs=where), FORK if split else spec) for where, split in split_rngs.items()),
        )
    )
    lifted = lifting.shard_map(
        ScopeKind("shard_map"),
        spread(fn),
        mesh=mesh,
        in_specs=(roles, in_specs, spec),
        out_specs=out_specs,
        axis_names=axis_names,
        check_vma=check_vma,
    )
    return taking_all(fn, lifted)
