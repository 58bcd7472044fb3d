"""Logical axes of variables and activations, which rules map to mesh axes.

See `weft.core.logical` for how rules are applied. `param_with_axes` and `variable_with_axes` are
for older programs: they store the names of axes in a separate collection such as `params_axes`,
whose layouts `get_axis_names` returns. New programs should store the names with the variable, see
`with_logical_partitioning`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from jax.sharding import PartitionSpec

from weft import errors, struct
from weft.core import FrozenDict, lift, meta, unfreeze
from weft.core.axis_rules import (
    get_logical_axis_rules as get_logical_axis_rules,
)
from weft.core.axis_rules import logical_axis_rules as logical_axis_rules
from weft.core.axis_rules import (
    set_logical_axis_rules as set_logical_axis_rules,
)
from weft.core.filters import Filter, union_filters
from weft.core.lift.transforms import VariableAxis, axis_number
from weft.core.logical import LogicallyPartitioned as LogicallyPartitioned
from weft.core.logical import RulesFallback as RulesFallback
from weft.core.logical import logical_to_mesh as logical_to_mesh
from weft.core.logical import logical_to_mesh_axes as logical_to_mesh_axes
from weft.core.logical import (
    logical_to_mesh_sharding as logical_to_mesh_sharding,
)
from weft.core.logical import with_logical_constraint as with_logical_constraint
from weft.core.logical import (
    with_logical_partitioning as with_logical_partitioning,
)
from weft.core.scope import Scope, Variable
from weft.lifting.signature import as_tuple
from weft.linen import transforms
from weft.linen.state import ModuleVariables, current_module
from weft.typing import PyTree, T

Target = TypeVar("Target")

ScanIn, ScanOut = lift.In, lift.Out
axis_rules, get_axis_rules = logical_axis_rules, get_logical_axis_rules
set_axis_rules, with_sharding_constraint = (
    set_logical_axis_rules,
    with_logical_constraint,
)


class AxisMetadata(struct.PyTreeNode, meta.AxisMetadata):
    """Names of a variable's axes, without the variable.

    Attributes:
        names: for each axis its logical name, or None; for a dict variable, a dict of these.

    >>> jax.tree.leaves(AxisMetadata(("embed", "mlp")))
    []
    """

    names: "Names" = struct.field(pytree_node=False)

    def unbox(self) -> Self:
        return self

    def replace_boxed(self, val: T) -> T:
        return val

    def add_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
        def with_axis(names: tuple[Any, ...]) -> tuple[Any, ...]:
            position = index if index >= 0 else index + len(names) + 1
            return (
                *names[:position],
                params.get(meta.PARTITION_NAME),
                *names[position:],
            )

        return self.replace(names=_map_names(with_axis, self.names))

    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
        def without_axis(names: tuple[Any, ...]) -> tuple[Any, ...]:
            position = index % len(names)
            return (*names[:position], *names[position + 1 :])

        return self.replace(names=_map_names(without_axis, self.names))


Names = tuple[Any, ...] | FrozenDict[str, Any]


def _map_names(fn: Callable[[Any], PyTree], names: PyTree) -> PyTree:
    """Maps the names of each array of a variable; None means an array without names."""
    if isinstance(names, Mapping):
        return FrozenDict(
            {key: _map_names(fn, value) for key, value in names.items()}
        )
    return None if names is None else fn(names)


class PartitionedVariable(Variable):
    """Variable whose value is laid out by the names of its axes on each read and write.

    `axes` has for each axis its logical name, or None.
    """

    def __init__(
        self,
        scope: Scope,
        collection: str,
        name: str,
        unbox: bool = True,
        axes: Sequence[Any] | Mapping[str, Any] | None = None,
        fallback: RulesFallback = RulesFallback.AXIS_IS_UNSHARDED,
    ):
        super().__init__(scope, collection, name, unbox)
        self.axes = unfreeze(axes)
        self.fallback = fallback

    @property
    def value(self) -> PyTree:
        """The value, laid out by the rules."""
        return with_sharding_constraint(
            super().value, self.axes, fallback=self.fallback
        )

    @value.setter
    def value(self, value: PyTree) -> None:
        value = with_sharding_constraint(
            value, self.axes, fallback=self.fallback
        )
        Variable.value.__set__(self, value)  # pyright: ignore[reportAttributeAccessIssue]


def param_with_axes(
    name: str,
    init_fn: Callable[..., T],
    *init_args: PyTree,
    axes: Sequence[str | None] | Mapping[str, Any] | None = None,
    module: ModuleVariables | None = None,
    **init_kwargs: PyTree,
) -> T:
    """Returns a parameter with axis names, laid out by the rules.

    Args:
        init_fn: see `Module.param`.
        axes: for each axis its logical name, or None; for a dict parameter, a dict of these.
        module: the parameter's module; by default the one whose method runs.

    Raises:
        AxisMetadataError: if the parameter already has other names.
        ModuleError: if no module's method runs.

    >>> class Scale(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return x * param_with_axes("scale", nn.initializers.ones, (3,), axes=("embed",))
    >>> variables = Scale().init(jax.random.key(0), jnp.ones(3))
    >>> get_axis_names(variables["params_axes"])
    FrozenDict({
        scale: P('embed',),
    })
    """
    module = _running_module(module, name)
    param = module.param(name, init_fn, *init_args, **init_kwargs)
    if axes is None:
        return param
    _record_axes(module, "params", name, axes)
    return with_sharding_constraint(param, unfreeze(axes))


def variable_with_axes(
    collection: str,
    name: str,
    init_fn: Callable[..., Any],
    *init_args: PyTree,
    axes: Sequence[str | None] | Mapping[str, Any] | None = None,
    module: ModuleVariables | None = None,
    fallback: RulesFallback = RulesFallback.AXIS_IS_UNSHARDED,
    **init_kwargs: PyTree,
) -> PartitionedVariable:
    """Returns a variable with axis names, laid out by the rules; see `param_with_axes`.

    Args:
        collection: the variable's collection; the names are stored in `f"{collection}_axes"`.
        fallback: see `with_logical_constraint`.
    """
    module = _running_module(module, name)
    variable = module.variable(
        collection, name, init_fn, *init_args, **init_kwargs
    )
    if axes is not None:
        _record_axes(module, collection, name, axes)
    return PartitionedVariable(
        variable.scope, collection, name, variable.unbox, axes, fallback
    )


def _running_module(
    module: ModuleVariables | None, name: str
) -> ModuleVariables:
    module = current_module() if module is None else module
    if module is None:
        raise errors.ModuleError(
            f"{name!r} was created where no module's method runs; give its module, as module=."
        )
    return module


def _record_axes(
    module: ModuleVariables,
    collection: str,
    name: str,
    axes: Sequence[Any] | Mapping[str, Any],
) -> None:
    """Stores the names of a variable's axes; raises AxisMetadataError if it has others."""
    try:
        new = AxisMetadata(_map_names(meta.checked_names, axes))
    except errors.AxisMetadataError as error:
        error.path = "/".join((*module.path, name))
        raise

    def agreed(stored: AxisMetadata | None, _: AxisMetadata) -> AxisMetadata:
        if stored is not None and stored != new:
            raise errors.AxisMetadataError(
                f"{name!r} of {'/'.join(module.path) or 'the outermost module'} was given axes="
                f"{new.names}, and has the names {stored.names}; give the same, or create its "
                f"collection {collection}_axes again."
            )
        return new

    module.sow(f"{collection}_axes", f"{name}_axes", new, agreed, lambda: None)


def get_axis_names(axes_metadata: PyTree) -> FrozenDict:
    """Returns the layouts of a collection like `params_axes`, as a tree like that of variables.

    Raises AxisMetadataError if a leaf is not `AxisMetadata`.

    >>> get_axis_names({"dense": {"kernel_axes": AxisMetadata(("embed", None))}})
    FrozenDict({
        dense: {
            kernel: P('embed', None),
        },
    })
    """

    def layouts_of(tree: PyTree, path: tuple[str, ...]) -> PyTree:
        if isinstance(tree, AxisMetadata):
            return _map_names(_layout, tree.names)
        if not isinstance(tree, Mapping):
            raise errors.AxisMetadataError(
                f"{'/'.join(path) or 'the collection'} is {tree!r}; expected AxisMetadata, as "
                "param_with_axes leaves it."
            )
        layouts: dict[str, PyTree] = {}
        for key, subtree in tree.items():
            layouts[key.removesuffix("_axes")] = layouts_of(
                subtree, (*path, str(key))
            )
        return layouts

    return FrozenDict(layouts_of(axes_metadata, ()))


def _layout(names: PyTree) -> PyTree:
    """Returns the layout of an array with these names, or those of a tree of such names."""
    if names is None or isinstance(names, PartitionSpec):
        return names
    if isinstance(names, str):
        return PartitionSpec(names)
    if all(name is None or isinstance(name, str) for name in names):
        return PartitionSpec(*names)
    layouts = [_layout(name) for name in names]
    return layouts if isinstance(names, list) else tuple(layouts)


def scan_with_axes(
    target: Target,
    variable_axes: Mapping[Any, VariableAxis] = {},
    variable_broadcast: Filter = False,
    variable_carry: Filter = False,
    split_rngs: Mapping[Any, bool] = {},
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    axis_name: str = "layers",
    axes_collections: Sequence[str] = ("params",),
    data_transform: Callable[..., Any] | None = None,
    methods: transforms.Methods = None,
) -> Target:
    """Applies `weft.linen.scan`, and adds the scanned axis to the names of axes."""
    axes_of_names: dict[str, VariableAxis] = {}
    shared_names: list[str] = []
    for collection in axes_collections:
        axis = variable_axes.get(collection)
        if axis is None:
            shared_names.append(f"{collection}_axes")
        else:
            axes_of_names[f"{collection}_axes"] = axis
    # The class names of Flax, which name submodules.
    prefix = "Map_variables" * len(axes_of_names) + "Scan"
    return transforms.transformed(
        prefix,
        lift.scan,
        target,
        methods,
        variable_axes={**variable_axes, **axes_of_names},
        variable_broadcast=union_filters(variable_broadcast, shared_names),
        variable_carry=variable_carry,
        split_rngs=split_rngs,
        in_axes=in_axes,
        out_axes=out_axes,
        length=length,
        reverse=reverse,
        unroll=unroll,
        data_transform=data_transform,
        metadata_params={meta.PARTITION_NAME: axis_name},
    )


def vmap_with_axes(
    target: Target,
    variable_axes: Mapping[Any, VariableAxis],
    split_rngs: Mapping[Any, bool] = {},
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    axis_size: int | None = None,
    axis_name: str | None = None,
    partitioning_axis_names: Mapping[Any, str] = {},
    spmd_axis_name: str | None = None,
    methods: transforms.Methods = None,
) -> Target:
    """Applies `weft.linen.vmap`, and adds the mapped axis to the names of axes.

    Args:
        partitioning_axis_names: the mapped axis's logical name, by collection with axis names.
    """
    axes = dict(variable_axes)
    for collection in partitioning_axis_names:
        axes[f"{collection}_axes"] = None
    mapped = transforms.vmap(
        target,
        axes,
        split_rngs,
        in_axes,
        out_axes,
        axis_size,
        axis_name,
        spmd_axis_name,
        methods=methods,
    )
    for collection, logical_name in partitioning_axis_names.items():
        if collection not in variable_axes:
            continue
        axis = axis_number(variable_axes[collection])
        mapped = transforms.add_metadata_axis(
            mapped,
            {f"{collection}_axes": axis},
            {meta.PARTITION_NAME: logical_name},
        )
    return mapped


def remat(
    target: Target,
    variables: Filter = True,
    rngs: Filter = True,
    concrete: bool = False,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
    methods: transforms.Methods = None,
) -> Target:
    """Applies `weft.linen.remat`, with `static_argnums` that do not count the module.

    Args:
        target: see `weft.linen.remat`, also for the other arguments.
        static_argnums: arguments after the module that are hashable values, not arrays.

    >>> Dropout = remat(nn.Dropout, static_argnums=1)
    >>> Dropout(0.5).apply({}, jnp.ones(3), True).tolist()
    [1.0, 1.0, 1.0]
    """
    argnums_with_module: list[int] = []
    for argnum in as_tuple(static_argnums):
        argnums_with_module.append(argnum + 1 if argnum >= 0 else argnum)
    return transforms.transformed(
        "Core_remat_static",
        lift.remat,
        target,
        methods,
        variables=variables,
        rngs=rngs,
        concrete=concrete,
        prevent_cse=prevent_cse,
        static_argnums=tuple(argnums_with_module),
        policy=policy,
    )
