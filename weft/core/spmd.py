"""Layouts of arrays on a mesh: sharding constraints, and shardings in any form.

A layout is a `PartitionSpec`: for each axis of an array, the mesh axes that split it. Its effect
depends on the type of each mesh axis: automatic axes get a constraint, explicit axes are resharded,
and manual axes of a `shard_map` are ignored.

A layout may also be a `NamedSharding`, a `Format` with one, or a tuple of names. Unlike in
`weft.core.logical`, names without a rule are mesh axes, and each name is translated separately: no
rule is skipped because of a used mesh axis. Invalid rules raise LogicalAxisError.
"""

import contextlib
import contextvars
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.interpreters.pxla
import numpy as np
from jax.core import Tracer
from jax.experimental.layout import Format
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

from weft.core.axis_rules import checked_rules
from weft.core.axis_rules import composite_rules as composite_rules
from weft.core.axis_rules import (
    get_logical_axis_rules as get_logical_axis_rules,
)
from weft.core.axis_rules import logical_axis_rules as logical_axis_rules
from weft.core.axis_rules import (
    set_logical_axis_rules as set_logical_axis_rules,
)
from weft.errors import MeshError, NoMeshError, ShardingWarning
from weft.functional.arrays import INLINE
from weft.typing import PyTree, Tensor

AnyMesh = Mesh | AbstractMesh
Entry = Any  # the mesh axes of one axis: a name, a tuple of names, None, or `UNCONSTRAINED`

# Outside of a compiled function, a constraint with an abstract mesh would reject arrays on a single
# device, and one with a mesh would lose the layout over explicit axes.
_constrained = jax.jit(
    jax.lax.with_sharding_constraint, static_argnums=1, inline=INLINE
)


with warnings.catch_warnings():
    # The only public way to the mesh of `with mesh:`, and deprecated like it.
    warnings.simplefilter("ignore", DeprecationWarning)
    _thread_resources: Any = getattr(
        jax.interpreters.pxla, "thread_resources", None
    )


def get_entered_mesh() -> Mesh | None:
    """Returns the mesh of an enclosing `with mesh:`, as long as JAX has it, or None."""
    mesh = _thread_resources and _thread_resources.env.physical_mesh
    return None if mesh is None or mesh.empty else mesh


def get_concrete_mesh() -> Mesh | None:
    """Returns the mesh of `jax.set_mesh` with its devices, else that of `with mesh:`, or None."""
    mesh = jax.sharding.get_mesh()
    return get_entered_mesh() if mesh.empty else mesh


def get_global_mesh() -> AnyMesh | None:
    """Returns the mesh of `jax.set_mesh`, else that of `with mesh:`, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return get_entered_mesh() if mesh.empty else mesh


def global_mesh_defined() -> bool:
    """Returns whether `get_global_mesh` returns a mesh."""
    return get_global_mesh() is not None


_SPLITS_UNEVENLY = contextvars.ContextVar("_SPLITS_UNEVENLY", default=False)


@contextlib.contextmanager
def uneven_rows(enabled: bool = True) -> Iterator[None]:
    """Lets `constrain` split rows into unequal parts in compiled functions.

    The rows are the first axis of an array. The compiler pads the smaller parts, and leaves the
    padding out of all results.
    """
    token = _SPLITS_UNEVENLY.set(enabled)
    try:
        yield
    finally:
        _SPLITS_UNEVENLY.reset(token)


_AS_ON_ONE_DEVICE = contextvars.ContextVar("_AS_ON_ONE_DEVICE", default=False)


@contextlib.contextmanager
def as_on_one_device() -> Iterator[None]:
    """Enters a context in which layers do what they would do on one device, to count operations.

    Pipelines run no idle steps: all layers, one after another. Experts have no rows of padding.
    """
    token = _AS_ON_ONE_DEVICE.set(True)
    try:
        yield
    finally:
        _AS_ON_ONE_DEVICE.reset(token)


def is_as_on_one_device() -> bool:
    """Returns whether the context is one of `as_on_one_device`."""
    return _AS_ON_ONE_DEVICE.get()


def axes_of(entry: Entry) -> tuple[str, ...]:
    """Returns the mesh axes in an entry of a layout."""
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple | list):
        return tuple(entry)
    return ()


def num_parts(axis_names: Entry) -> int:
    """Returns into how many parts the current mesh splits an axis; 1 without a mesh.

    >>> num_parts("data")
    1
    """
    mesh = get_global_mesh()
    if mesh is None:
        return 1
    return math.prod(mesh.shape[name] for name in axes_of(axis_names))


def constrain(
    value: PyTree, spec: PartitionSpec, mesh: AnyMesh | None = None
) -> PyTree:
    """Lays out every array of a tree over a mesh.

    Args:
        value: a pytree; leaves that are not arrays, such as `jax.ShapeDtypeStruct`, are unchanged.
        mesh: by default that of `get_global_mesh`; without either, `value` is unchanged.

    Raises MeshError if the mesh lacks an axis, or the layout has more axes than an array.

    Warns:
        ShardingWarning: if a mesh axis does not divide an array's axis, which then is not split.

    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    >>> constrain(jax.numpy.ones(4), PartitionSpec("data"), mesh).sharding.spec
    P('data',)
    """
    context_mesh = get_global_mesh()
    if mesh is None or (
        context_mesh is not None
        and context_mesh.shape_tuple == mesh.shape_tuple
    ):
        # Inside of a shard_map, only the mesh of the context knows the manual axes.
        mesh = context_mesh
    if mesh is None or all(
        axis_type is AxisType.Manual for axis_type in mesh.axis_types
    ):
        return value  # inside of a shard_map over the whole mesh, all axes are manual
    return jax.tree.map(lambda leaf: _place(leaf, spec, mesh), value)


def constrain_like_jit(
    value: Tensor, sharding: jax.sharding.Sharding | PartitionSpec
) -> Tensor:
    """Lays out an array in a compiled function as `in_shardings` of `jax.jit`.

    Unlike `jax.lax.with_sharding_constraint`, accepts explicit axes.
    """
    if isinstance(sharding, NamedSharding):
        mesh, spec = sharding.mesh, sharding.spec
    else:
        mesh, spec = get_global_mesh(), sharding
    has_explicit_axes = (
        mesh is not None and AxisType.Explicit in mesh.axis_types
    )
    if has_explicit_axes and isinstance(spec, PartitionSpec):
        return constrain(value, spec, mesh)
    return jax.lax.with_sharding_constraint(value, sharding)


def _place(leaf: PyTree, spec: PartitionSpec, mesh: AnyMesh) -> PyTree:
    """Lays out an array; axes of a mesh are explicit, automatic or manual."""
    if not isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    # Neither explicit axes nor arrays outside of compiled functions have unequal parts.
    with_uneven_rows = (
        _SPLITS_UNEVENLY.get()
        and isinstance(leaf, Tracer)
        and AxisType.Explicit not in mesh.axis_types
    )
    entries = fitting_spec(
        spec, leaf.shape, mesh, with_uneven_rows=with_uneven_rows
    )
    apply_constraint = jax.lax.with_sharding_constraint
    if not isinstance(mesh, Mesh) or AxisType.Explicit in mesh.axis_types:
        apply_constraint = _constrained
    if AxisType.Explicit in mesh.axis_types:
        present_spec = jax.typeof(leaf).sharding.spec
        wanted_spec: list[Entry] = []
        for entry, present in zip(
            _of_type(AxisType.Explicit, entries, mesh),
            present_spec,
            strict=False,
        ):
            is_free = entry is PartitionSpec.UNCONSTRAINED
            wanted_spec.append(present if is_free else entry)
        leaf = jax.sharding.reshard(leaf, _sharding(mesh, wanted_spec))
    if AxisType.Auto in mesh.axis_types:
        auto_entries = _of_type(AxisType.Auto, entries, mesh)
        leaf = apply_constraint(leaf, _sharding(mesh, auto_entries))
    return leaf


def _of_type(
    axis_type: AxisType, entries: Iterable[Entry], mesh: AnyMesh
) -> list[Entry]:
    """Returns the entries of a layout with only the mesh axes of a type."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    new_entries: list[Entry] = []
    for entry in entries:
        if entry is PartitionSpec.UNCONSTRAINED:
            new_entries.append(entry)
            continue
        axes = tuple(
            axis for axis in axes_of(entry) if types[axis] is axis_type
        )
        if len(axes) > 1:
            new_entries.append(axes)
        else:
            new_entries.append(axes[0] if axes else None)
    return new_entries


def _sharding(
    mesh: AnyMesh, entries: Iterable[Entry]
) -> NamedSharding | PartitionSpec:
    spec = PartitionSpec(*entries)
    return NamedSharding(mesh, spec) if isinstance(mesh, Mesh) else spec


def fitting_spec(
    spec: PartitionSpec,
    shape: tuple[int, ...],
    mesh: AnyMesh,
    *,
    with_uneven_rows: bool = False,
) -> list[Entry]:
    """Returns the entries of a layout, with a warning and None where a shape cannot be split.

    `with_uneven_rows` is whether the parts of the first axis may differ in size.
    """
    if len(spec) > len(shape):
        raise MeshError(
            f"a value of shape {shape} has {len(shape)} axes, and the layout {tuple(spec)} names "
            f"{len(spec)}; name each axis once, None for one that is not split."
        )
    sizes: dict[str, int] = {}
    for name, axis_type in zip(mesh.axis_names, mesh.axis_types, strict=True):
        sizes[name] = 1 if axis_type is AxisType.Manual else mesh.shape[name]
    counts: Counter[str] = Counter()
    for entry in spec:
        counts.update(axes_of(entry))
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise MeshError(
            f"the layout {tuple(spec)} of a value of shape {shape} names "
            f"{', '.join(map(repr, repeated))} more than once, and a mesh axis splits one axis of "
            "a value; leave it at one, and write None at the others."
        )
    entries = list(spec)
    for axis, entry in enumerate(spec):
        unknown = [name for name in axes_of(entry) if name not in sizes]
        if unknown:
            raise MeshError(
                f"axis {axis} of a value of shape {shape} is to be split over "
                f"{', '.join(map(repr, unknown))}, and the mesh has the axes "
                f"{', '.join(map(repr, sizes))}; use one of those, or None, or give rules that "
                "map the logical name to a mesh axis."
            )
        n_parts = math.prod(sizes[name] for name in axes_of(entry))
        if axis == 0 and with_uneven_rows and shape[axis] > n_parts:
            continue
        if shape[axis] % n_parts:
            warnings.warn(
                f"axis {axis} of a value of shape {shape} cannot be split into {n_parts} equal "
                f"parts over {entry!r}, so it is not split; change its size or its layout.",
                ShardingWarning,
                stacklevel=2,
            )
            entries[axis] = None
    return entries


AnyRules = Iterable[Sequence[Any]]
Layout = NamedSharding | Format | PartitionSpec | tuple[Any, ...]
AnySharding = Any  # a `Layout`, or any other value, which is not a sharding


def get_mesh(sharding: AnySharding) -> AnyMesh | None:
    """Returns the mesh of a sharding, or None."""
    sharding = without_format(sharding)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def without_format(sharding: AnySharding) -> AnySharding:
    """Returns the sharding of a `Format`; other values unchanged."""
    return sharding.sharding if isinstance(sharding, Format) else sharding


def map_sharding(
    f: Callable[[Entry], Entry], sharding: AnySharding
) -> NamedSharding | PartitionSpec | None:
    """Maps the entry of each axis of a sharding.

    Returns a `NamedSharding` over the same mesh or a `PartitionSpec`; None for other values.

    >>> map_sharding(str.upper, ("data", "model"))
    P('DATA', 'MODEL')
    """
    sharding = without_format(sharding)
    if isinstance(sharding, NamedSharding):
        return NamedSharding(
            sharding.mesh, PartitionSpec(*map(f, sharding.spec))
        )
    if isinstance(sharding, PartitionSpec | tuple):
        return PartitionSpec(*map(f, sharding))
    return None


def from_sharding_rules(
    sharding: Iterable[Entry], sharding_rules: AnyRules
) -> tuple[Entry, ...]:
    """Translates names to mesh axes by these rules alone; the last one for a name applies.

    >>> from_sharding_rules(("embed", "model", None), [("embed", "data")])
    ('data', 'model', None)
    """
    return tuple(map(_translator(sharding_rules), sharding))


def _translator(rules: AnyRules) -> Callable[[Entry], Entry]:
    mesh_axes = dict(checked_rules(rules))

    def translate(entry: Entry) -> Entry:
        return mesh_axes.get(entry, entry) if isinstance(entry, str) else entry

    return translate


def apply_rules(sharding: AnySharding, sharding_rules: AnyRules | None) -> Any:
    """Translates a sharding's names to mesh axes, by these rules and those of the context.

    Names without a rule are unchanged; for values that are not shardings, the result is None.

    Raises LogicalAxisError if rules for a name differ from those of the context.

    >>> apply_rules(("embed", None), [("embed", "data")])
    P('data', None)
    """
    rules = composite_rules(get_logical_axis_rules(), sharding_rules)
    return map_sharding(_translator(rules), sharding)


def get_pspec(
    sharding: AnySharding, sharding_rules: AnyRules | None = None
) -> PartitionSpec | None:
    """Returns the layout of a sharding, with its names as mesh axes; see `apply_rules`."""
    sharding = without_format(sharding)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    return apply_rules(spec, sharding_rules)


def shard_value(
    value: PyTree,
    out_sharding: AnySharding,
    sharding_rules: AnyRules | None,
    mesh: AnyMesh | None,
) -> PyTree:
    """Lays out a value over a mesh.

    Args:
        out_sharding: a `NamedSharding`, a `PartitionSpec` or a tuple of names. For None or no
            entries, the value is returned unchanged.
        sharding_rules: see `apply_rules`.
        mesh: by default that of `out_sharding` or of `jax.set_mesh`.

    Raises:
        NoMeshError: if there is no mesh.
        MeshError: if the mesh lacks an axis, or there are more entries than axes.

    Warns:
        ShardingWarning: if a mesh axis does not divide an axis of the value.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> shard_value(jax.numpy.ones(4), ("embed",), [("embed", "data")], mesh).sharding.spec
    P('data',)
    """
    spec = get_pspec(out_sharding, sharding_rules)
    if not spec:
        return value
    if mesh is None:
        mesh = get_mesh(out_sharding)
    if mesh is None:
        mesh = get_global_mesh()
    if mesh is None:
        raise NoMeshError(
            f"a value is to be laid out as {spec}, and there is no mesh; give one, or enter "
            "jax.set_mesh(mesh)."
        )
    return constrain(value, spec, mesh)


def check_divides(
    path: str, shape: Sequence[int], sharding: NamedSharding
) -> None:
    """Raises a MeshError for an axis that is not divisible, or a mesh axis that is missing."""
    sizes = dict(sharding.mesh.shape)
    for i, entry in enumerate(sharding.spec):
        names = axes_of(entry)
        parts = math.prod(sizes[name] for name in names)
        if shape[i] % parts:
            raise MeshError(
                f"{path} of shape {tuple(shape)} is laid out as {sharding.spec}: axis {i} of size "
                f"{shape[i]} does not divide over {'×'.join(names)} = {parts} devices. Change the "
                "size, the mesh_shape, or the parameter's partition spec."
            )


def named_sharding(
    mesh: AnyMesh, spec: PartitionSpec, path: str
) -> NamedSharding:
    """Returns the sharding of an array; raises a MeshError for axes that the mesh does not have."""
    names: set[str] = set()
    for entry in spec:
        names.update(axes_of(entry))
    missing_names = sorted(names.difference(mesh.axis_names))
    if missing_names:
        raise MeshError(
            f"{path} is laid out as {spec}, but the mesh has no axis {missing_names}; it has "
            f"{mesh.axis_names}. Add the axis to mesh_axis_names (its size may be 1)."
        )
    return NamedSharding(mesh, spec)
