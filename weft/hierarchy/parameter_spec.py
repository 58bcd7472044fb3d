"""Specifications of parameters: shape, sharding, initialization."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec

from weft.core import axis_rules, display, logical, spmd
from weft.errors import ParameterSpecError
from weft.functional.arrays import sharded_as
from weft.hierarchy.param_init import (
    FanAxes,
    Initializer,
    constant_initializer,
    fans,
    maybe_prepend_axis,
)
from weft.typing import DType, MeshAxes, Nested, Shape, Tensor


class FactorizationSpec(NamedTuple):
    """Axes for factorized optimizer statistics: "row", "col" or None for each axis."""

    axes: tuple[str | None, ...]


def pad_axes(
    mesh_axes: MeshAxes | PartitionSpec | None, ndim: int
) -> tuple[Any, ...]:
    """Returns mesh axes for `ndim` axes, with None for those that `mesh_axes` leaves out."""
    entries = tuple(mesh_axes or ())
    return entries + (None,) * (ndim - len(entries))


@dataclasses.dataclass(frozen=True, repr=False)
class TensorSpec:
    """Shape, dtype and sharding of an array.

    Attributes:
        dtype: None where a layer leaves it to its config.
        mesh_axes: mesh axes of each axis; the last ones may be omitted. None is replicated.
        memory_kind: memory space such as "pinned_host"; None for device memory.
    """

    shape: Shape
    dtype: DType | None = None
    mesh_axes: MeshAxes | PartitionSpec | None = None
    memory_kind: str | None = None

    def _set_fields(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not field.default:
                values[field.name] = value
        return values

    def __repr__(self) -> str:
        arguments = [
            f"{name}={value!r}" for name, value in self._set_fields().items()
        ]
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __treescope_repr__(
        self, path: str | None, subtree_renderer: Callable[..., object]
    ) -> object:
        return display.render_tree(
            self, self._set_fields(), path, subtree_renderer
        )

    @property
    def partition_spec(self) -> PartitionSpec:
        """Sharding as a PartitionSpec."""
        entries = pad_axes(self.mesh_axes, len(self.shape))
        # A list, such as one in a config's text, cannot be hashed.
        return PartitionSpec(
            *(tuple(x) if isinstance(x, list) else x for x in entries)
        )

    def sharding(self, mesh: spmd.AnyMesh) -> jax.sharding.NamedSharding:
        """Returns the sharding on a mesh."""
        return jax.sharding.NamedSharding(
            mesh, self.partition_spec, memory_kind=self.memory_kind
        )


@dataclasses.dataclass(frozen=True, repr=False)
class ParameterSpec(TensorSpec):
    """Specification of a layer's parameter.

    Attributes:
        initializer: None for the layer's `param_init`.
        fan_axes: input and output axes; None for the layer's own rule.
        weight_decay_scale: factor of weight decay; None for 1.
        logical_axes: logical names of the axes, if rules derived `mesh_axes` from them.
        is_state: whether this is state rather than a parameter, such as moving statistics or a
            cache. Only the layer updates state, which derivatives, optimizers and averages skip.

    Raises ParameterSpecError if `mesh_axes` is longer than `shape`, or `factorization` not as long.
    """

    initializer: Initializer | None = None
    factorization: FactorizationSpec | None = None
    fan_axes: FanAxes | None = None
    weight_decay_scale: float | None = None
    logical_axes: tuple[Any, ...] | None = None
    is_state: bool = False

    def __post_init__(self):
        if self.mesh_axes is not None and len(self.mesh_axes) < len(self.shape):
            mesh_axes = pad_axes(self.mesh_axes, len(self.shape))
            if isinstance(self.mesh_axes, PartitionSpec):
                mesh_axes = PartitionSpec(*mesh_axes)
            object.__setattr__(self, "mesh_axes", mesh_axes)
        self._check_num_entries("mesh_axes", self.mesh_axes)
        if self.factorization is not None:
            self._check_num_entries("factorization", self.factorization.axes)

    def _check_num_entries(
        self, name: str, entries: MeshAxes | PartitionSpec | None
    ) -> None:
        if entries is not None and len(entries) != len(self.shape):
            raise ParameterSpecError(
                f"{name}={entries} has {len(entries)} entries, but shape={tuple(self.shape)} has "
                f"{len(self.shape)} axes; give one entry per axis."
            )

    def fans(self) -> dict[str, float]:
        """Returns "fan_in", "fan_out" and "fan_avg", or raises ParameterSpecError without axes."""
        if self.fan_axes is None:
            raise ParameterSpecError(
                f"a parameter of shape {tuple(self.shape)} has no fan axes; set `fan_axes`."
            )
        return fans(self.shape, self.fan_axes)


NestedParameterSpec = Nested[ParameterSpec]
"""Specs of parameters, nested as the parameters."""


def constant_spec(
    shape: Shape, value: float = 0.0, **kwargs: Any
) -> ParameterSpec:
    """Returns the spec of a parameter that starts at `value` and has no weight decay."""
    initializer = constant_initializer(value)
    return ParameterSpec(
        shape, initializer=initializer, weight_decay_scale=0.0, **kwargs
    )


def weight_and_bias_specs(
    cfg: Any,
    shape: Shape,
    factors: tuple[str | None, ...],
    *,
    bias_axes: slice,
    fan_axes: FanAxes | None = None,
) -> dict[str, ParameterSpec]:
    """Returns the specs of the weight of a linear map and, if `cfg.bias`, of its bias.

    The weight is sharded by `cfg.param_partition_spec`. The bias has its axes `bias_axes`.
    """
    mesh_axes = pad_axes(cfg.param_partition_spec, len(shape))
    factorization = FactorizationSpec(factors)
    weight = ParameterSpec(
        shape,
        mesh_axes=mesh_axes,
        factorization=factorization,
        fan_axes=fan_axes,
    )
    if not cfg.bias:
        return {"weight": weight}
    bias = ParameterSpec(shape[bias_axes], mesh_axes=mesh_axes[bias_axes])
    return {"weight": weight, "bias": bias}


def with_leading_axis(
    spec: ParameterSpec, size: int, mesh_axis: str | Sequence[str] | None = None
) -> ParameterSpec:
    """Returns the spec of `size` stacked copies; the new axis is sharded over `mesh_axis`."""
    factorization = spec.factorization
    if factorization is not None:
        factorization = FactorizationSpec((None, *factorization.axes))
    fan_axes = maybe_prepend_axis(
        spec.fan_axes, axis_type=FanAxes.AxisType.BATCH_AXIS
    )
    logical_axes = spec.logical_axes
    if logical_axes:
        logical_axes = (spmd.axes_of(mesh_axis) or None, *logical_axes)
    return dataclasses.replace(
        spec,
        shape=(size, *spec.shape),
        mesh_axes=PartitionSpec(mesh_axis, *spec.partition_spec),
        logical_axes=logical_axes,
        factorization=factorization,
        fan_axes=fan_axes,
    )


def with_leading_axis_name(spec: ParameterSpec, name: str) -> ParameterSpec:
    """Names the first axis of a spec and shards it by the rules of the context.

    Without a rule, `name` is a mesh axis. Raises LogicalAxisError if another axis has this name.
    """
    # A name without a rule is marked as a mesh axis, and is then no string.
    (first_name,) = logical.mark_mesh_axes(
        (name,), axis_rules.get_logical_axis_rules()
    )
    names = (first_name, *tuple(spec.logical_axes or spec.partition_spec)[1:])
    mesh_axes = logical.names_to_mesh_axes(names)
    if (
        logical.names_to_mesh_axes((None, *names[1:]))[1:]
        != spec.partition_spec[1:]
    ):
        # The spec is sharded by other rules; those of the context take precedence.
        first_entry = logical.names_to_mesh_axes((first_name,))[0]
        mesh_axes_in_use: set[str] = set()
        for entry in spec.partition_spec[1:]:
            mesh_axes_in_use.update(spmd.axes_of(entry))
        if mesh_axes_in_use.intersection(spmd.axes_of(first_entry)):
            first_entry = None
        mesh_axes = PartitionSpec(first_entry, *spec.partition_spec[1:])
    logical_axes = None
    if spec.logical_axes is not None or isinstance(first_name, str):
        logical_axes = names
    return dataclasses.replace(
        spec, mesh_axes=mesh_axes, logical_axes=logical_axes
    )


def num_parts(entry: Any) -> int:
    """Returns into how many parts the mesh of the context splits an axis with this entry.

    It is 1 for axes that the mesh lacks, and inside of a `shard_map` over them.
    """
    mesh = spmd.get_global_mesh()
    if mesh is None:
        return 1
    count = 1
    for name, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if name in spmd.axes_of(entry) and axis_type is not AxisType.Manual:
            count *= mesh.shape[name]
    return count


def free_if_indivisible(
    partition_spec: PartitionSpec | MeshAxes | None, *, axis: int, size: int
) -> PartitionSpec | MeshAxes | None:
    """Returns a layout that leaves an axis to the compiler if it cannot be split as it says."""
    if partition_spec is None:
        return None
    entries = list(logical.names_to_mesh_axes(partition_spec))
    if len(entries) <= axis or size % num_parts(entries[axis]) == 0:
        return partition_spec
    entries[axis] = PartitionSpec.UNCONSTRAINED
    return PartitionSpec(*entries)


def maybe_shard(
    x: Tensor, partition_spec: PartitionSpec | MeshAxes | None
) -> Tensor:
    """Constrains the sharding of an array on the mesh of `jax.set_mesh`.

    Args:
      partition_spec: mesh axes of each axis, or logical names with rules in the context. Without
        it, or without a mesh, `x` is returned as it is.

    Raises MeshError if the mesh lacks an axis, or the spec has more axes than the array.

    Warns:
      ShardingWarning: if a mesh axis does not divide an axis of the array, which then is not split.
        Axes of size 1, such as a single decoding position, are not split without a warning.
    """
    mesh = spmd.get_global_mesh()
    if partition_spec is None or mesh is None:
        return x
    entries = list(logical.names_to_mesh_axes(partition_spec))
    for axis, size in enumerate(x.shape[: len(entries)]):
        if size == 1 and set(mesh.axis_names).issuperset(
            spmd.axes_of(entries[axis])
        ):
            entries[axis] = None
    return spmd.constrain(x, PartitionSpec(*entries))


def shard_weight(
    weight: Tensor, partition_spec: PartitionSpec | MeshAxes | None
) -> Tensor:
    """Constrains the sharding of a weight where it is used, as `maybe_shard`, but not its gradient.

    With the same constraint on the gradient, each device would get all of it, and keep a part.
    """
    if partition_spec is None or spmd.get_global_mesh() is None:
        return weight

    @jax.custom_jvp
    def sharded(weight: Tensor) -> Tensor:
        return maybe_shard(weight, partition_spec)

    @sharded.defjvp
    def sharded_jvp(
        primals: tuple[Tensor], tangents: tuple[Tensor]
    ) -> tuple[Tensor, Tensor]:
        output = sharded(*primals)
        # Over Explicit axes, the sharding is a part of the type.
        return output, sharded_as(tangents[0], output)

    return sharded(weight)
