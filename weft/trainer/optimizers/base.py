"""Optimizers as triples of pure functions, and their composition.

    state   = init(params)                       params: a tree of OptParam
    updates, state = update(updates, state, params)
    specs   = partition(param_specs)             laid out as state, each leaf a TensorSpec

The first two are those of optax, except that a parameter carries metadata of its layer; `partition`
computes the state's layout on the mesh before the state exists. A plain optax transformation works
wherever such an optimizer is expected; its `partition` is derived from its `init`.

Some transformations of optax need more than gradients, such as the loss, which a learner passes by
name; `PartitionedGradientTransformationExtraArgs` are those that take such arguments.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from weft import config, errors
from weft.hierarchy.base_layer import NestedParameterSpec
from weft.hierarchy.module import current_context
from weft.hierarchy.parameter_spec import FactorizationSpec, TensorSpec
from weft.typing import DType, Nested, NestedTensor, PyTree, Shape, T, Tensor


@dataclasses.dataclass(frozen=True)
class OptParam:
    """Parameter as an optimizer sees it; a leaf of the tree of parameters.

    Attributes:
      factorization_spec: axes along which to factor statistics; None if they may not be factored.
      weight_decay_scale: the layer's factor for weight decay; None leaves it to the optimizer.
      is_state: whether it is state of the layer, which optimizers leave unchanged.
    """

    value: Tensor
    factorization_spec: FactorizationSpec | None = None
    weight_decay_scale: float | None = None
    is_state: bool = False

    @property
    def shape(self) -> Shape:
        return self.value.shape

    @property
    def dtype(self) -> DType:
        return self.value.dtype


NestedOptParam = Nested[OptParam]
"""Parameters as an optimizer sees them, nested as the model's."""
OptStateSpec = TensorSpec
"""Shape, dtype and sharding of an array of an optimizer's state."""
NestedOptStateSpec = (
    Any  # a pytree laid out as the optimizer's state, with OptStateSpec leaves
)

TransformInitFn = Callable[[NestedOptParam], Any]
"""Makes a transformation's state."""
TransformPartitionSpecFn = Callable[[NestedParameterSpec], NestedOptStateSpec]
"""Makes the specs of a transformation's state."""


class TransformUpdateFn(Protocol):
    """Function that transforms updates and the state of the transformation."""

    def __call__(
        self, updates: NestedTensor, state: Any, params: NestedOptParam
    ) -> tuple[NestedTensor, Any]:
        """Performs one step on gradients, or on the output of an earlier transformation.

        Args:
          params: before the update.

        Returns the new updates, which after the last transformation are added to the parameters,
        and the state.
        """
        ...


class PartitionedGradientTransformation(NamedTuple):
    """Optimizer, or a part of one: its initial state, one step, and the layout of its state."""

    init: TransformInitFn
    update: TransformUpdateFn
    partition: TransformPartitionSpecFn


class PartitionedGradientTransformationExtraArgs(
    PartitionedGradientTransformation
):
    """Optimizer whose `update` also takes the arguments of a learner, by name.

    Those are `value`, the loss of the step; `grad`, its gradients before any transformation;
    `value_fn`, also as `obj_fn`, the loss of the step's batch as a function of the parameters; and
    `grad_fn`, the gradients of that loss as a function of the parameters and of an inner step.
    """

    __slots__ = ()


def update_with(
    transformation: PartitionedGradientTransformation,
    updates: NestedTensor,
    state: Any,
    params: NestedOptParam,
    extra_args: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Performs one step of a transformation, with the arguments by name if it takes them."""
    if isinstance(transformation, PartitionedGradientTransformationExtraArgs):
        update: Callable[..., tuple[Any, Any]] = transformation.update
        return update(updates, state, params, **extra_args)
    return transformation.update(updates, state, params)


TransformationLike = (
    PartitionedGradientTransformation
    | optax.GradientTransformation
    | optax.MultiSteps
    | config.InstantiableConfig[Any]
)


def opt_param_values(params: NestedOptParam) -> NestedTensor:
    """Returns the arrays of a tree of parameters.

    >>> opt_param_values({"w": OptParam(value=1.0)})
    {'w': 1.0}
    """
    return jax.tree.map(lambda param: param.value, params)


def tree_paths(
    tree: Nested[object],
    separator: str = "/",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Nested[str]:
    """Returns a tree like `tree` with the path of each leaf, such as "decoder/emb/weight".

    >>> tree_paths({"a": {"b": 1}, "c": (2, 3)})
    {'a': {'b': 'a/b'}, 'c': ('c/0', 'c/1')}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path_name(path, separator), tree, is_leaf=is_leaf
    )


def path_name(path: tuple[Any, ...], separator: str = "/") -> str:
    """Returns a JAX key path as names joined by a separator."""
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def leaves_by_path(tree: PyTree) -> dict[tuple[Any, ...], Any]:
    """Returns the leaves of a tree by their JAX key paths."""
    return dict(jax.tree_util.tree_leaves_with_path(tree))


def report(name: str, value: jax.typing.ArrayLike) -> None:
    """Adds a summary to the current invocation, if any, in place of an earlier one of that name."""
    context = current_context()
    if context is not None:
        context.get_summaries()[name] = value


# Partitioning.


def replicated(shape: Shape, dtype: DType) -> OptStateSpec:
    """Returns the spec of a replicated array."""
    return TensorSpec(
        shape=tuple(shape), dtype=dtype, mesh_axes=(None,) * len(shape)
    )


def spec_like(param: Any, dtype: DType) -> OptStateSpec:
    """Returns the spec of an array laid out like a parameter, given that or its spec."""
    return TensorSpec(param.shape, dtype, getattr(param, "mesh_axes", None))


# Any, since it takes the place of an array in states.
COUNT_SPEC: Any = replicated((), jnp.int32)


def copy_partition(
    specs: Nested[TensorSpec],
    *,
    pattern: str | re.Pattern | None = None,
    memory_kind: str | None = None,
) -> Any:
    """Returns specs of arrays laid out like those that `specs`, of parameters or states, describe.

    Args:
      pattern: sets the memory kind only where it matches the whole path; None sets it everywhere.
      memory_kind: the memory that holds the arrays; None leaves it unchanged.
    """

    def copied(path: tuple[Any, ...], spec: TensorSpec) -> TensorSpec:
        kind = spec.memory_kind
        if memory_kind is not None and (
            pattern is None or re.fullmatch(pattern, path_name(path))
        ):
            kind = memory_kind
        return TensorSpec(spec.shape, spec.dtype, spec.mesh_axes, kind)

    return jax.tree_util.tree_map_with_path(copied, specs)


def mirrored_partition(init: Callable[[Any], Any]) -> TransformPartitionSpecFn:
    """Derives the layout of a state from the function that makes it, evaluated abstractly.

    A leaf of the state with the shape of a parameter and a path that ends in that parameter's path
    is laid out like the parameter; all other leaves are replicated.
    """

    def partition(param_specs: NestedParameterSpec) -> NestedOptStateSpec:
        specs_by_path = leaves_by_path(param_specs)

        def abstract(spec: TensorSpec) -> jax.ShapeDtypeStruct:
            dtype = jnp.float32 if spec.dtype is None else spec.dtype
            return jax.ShapeDtypeStruct(spec.shape, dtype)

        shapes = jax.tree.map(abstract, param_specs)

        def laid_out(
            path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct
        ) -> OptStateSpec:
            spec = parameter_of(path, leaf, specs_by_path)
            if spec is None:
                return replicated(leaf.shape, leaf.dtype)
            return TensorSpec(
                shape=leaf.shape, dtype=leaf.dtype, mesh_axes=spec.mesh_axes
            )

        return jax.tree_util.tree_map_with_path(
            laid_out, jax.eval_shape(init, shapes)
        )

    return partition


def parameter_of(
    path: tuple[Any, ...],
    leaf: Any,
    params_by_path: Mapping[tuple[Any, ...], T],
) -> T | None:
    """Returns the parameter that a leaf of an optimizer's state belongs to, as a moment does.

    That is the one of the same shape whose path ends that of the leaf; None if there is none.
    """
    for start in range(len(path) + 1):  # the longest suffix first
        param: Any = params_by_path.get(path[start:])
        if param is not None:
            return param if tuple(param.shape) == tuple(leaf.shape) else None
    return None


def with_dtype(x: Any, dtype: DType) -> Any:
    """Returns an array, its shape, an `OptParam` or a `TensorSpec` in another dtype."""
    if isinstance(x, OptParam):
        return dataclasses.replace(x, value=x.value.astype(dtype))
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=dtype)
    if isinstance(x, TensorSpec):
        return dataclasses.replace(x, dtype=dtype)
    return x.astype(dtype)


def at_least_float32(tree: T) -> T:
    """Returns a tree of arrays, `OptParam`s or `TensorSpec`s with floats of at least float32."""

    def widened(x: Any) -> Any:
        is_short = (
            jnp.issubdtype(x.dtype, jnp.floating)
            and jnp.dtype(x.dtype).itemsize < 4
        )
        if not is_short:
            return x
        return with_dtype(x, jnp.float32)

    return jax.tree.map(widened, tree)


def with_partition_fn(
    base: optax.GradientTransformation, partition_fn: TransformPartitionSpecFn
) -> PartitionedGradientTransformation:
    """Adds a partition to an optax transformation, which sees only the arrays of the parameters."""
    names = _names_of_extra_args(base.update)

    def init_fn(params: NestedOptParam) -> Any:
        return base.init(opt_param_values(params))

    def update_fn(
        updates: NestedTensor,
        state: optax.OptState,
        params: NestedOptParam,
        **extra_args: Any,
    ) -> tuple[Any, optax.OptState]:
        if names is not None:
            extra_args = {
                name: x for name, x in extra_args.items() if name in names
            }
        return base.update(
            updates, state, opt_param_values(params), **extra_args
        )

    cls = PartitionedGradientTransformation
    if isinstance(base, optax.GradientTransformationExtraArgs):
        cls = PartitionedGradientTransformationExtraArgs
    return cls(init_fn, update_fn, partition_fn)


def _names_of_extra_args(update: Callable[..., Any]) -> list[str] | None:
    """Returns the names of the arguments that an update takes by keyword; None if it takes any.

    Optax asks for an update that takes any, but `optax.contrib.sam` takes `grad_fn` alone.
    """
    parameters = inspect.signature(update).parameters.values()
    if any(x.kind is x.VAR_KEYWORD for x in parameters):
        return None
    return [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]


def as_partitioned(
    transformation: TransformationLike,
) -> PartitionedGradientTransformation:
    """Returns either kind of transformation, or one made from a config, with its partition.

    Raises a TransformationTypeError for other values.
    """
    optimizer = config.maybe_instantiate(transformation)
    if isinstance(optimizer, PartitionedGradientTransformation):
        return optimizer
    if isinstance(optimizer, optax.MultiSteps):
        update: Any = optimizer.update
        optimizer = optax.GradientTransformationExtraArgs(
            optimizer.init, update
        )
    if isinstance(optimizer, optax.GradientTransformation):
        return with_partition_fn(optimizer, mirrored_partition(optimizer.init))
    raise errors.TransformationTypeError(
        "an optimizer is a PartitionedGradientTransformation, an optax.GradientTransformation, or "
        f"a config of one; got {optimizer!r} of type {type(optimizer).__name__}."
    )


def adam_partition(
    base: optax.GradientTransformation,
) -> PartitionedGradientTransformation:
    """Returns `optax.scale_by_adam` with both moments laid out like the parameters."""
    return as_partitioned(base)


def trace_partition(
    base: optax.GradientTransformation,
) -> PartitionedGradientTransformation:
    """Returns `optax.trace` with the trace laid out like the parameters."""
    return as_partitioned(base)


# Composition.


def stateless(
    update_fn: Callable[[NestedTensor, NestedOptParam], NestedTensor],
) -> PartitionedGradientTransformation:
    """Creates a transformation without state from a function of updates and parameters."""
    return PartitionedGradientTransformation(
        init=lambda params: optax.EmptyState(),
        update=lambda updates, state, params: (
            update_fn(updates, params),
            state,
        ),
        partition=lambda param_specs: optax.EmptyState(),
    )


def starting_at_zero(
    update_fn: TransformUpdateFn, specs_of: Callable[[Any], Any]
) -> PartitionedGradientTransformation:
    """Creates a transformation whose state is zero before the first step.

    `specs_of` returns the specs of the state, from the parameters or from their specs.
    """

    def init_fn(params: NestedOptParam) -> Any:
        return jax.tree.map(
            lambda spec: jnp.zeros(spec.shape, spec.dtype), specs_of(params)
        )

    return PartitionedGradientTransformation(init_fn, update_fn, specs_of)


def identity() -> PartitionedGradientTransformation:
    """Returns a transformation that leaves updates unchanged."""
    return stateless(lambda updates, params: updates)


def chain(*args: TransformationLike) -> PartitionedGradientTransformation:
    """Chains transformations, with or without a partition, or their configs; the state is a tuple.

    Raises a TransformationTypeError for other values.

    >>> tx = chain(optax.scale(2.0), optax.scale(3.0))
    >>> params = {"w": OptParam(value=jnp.zeros(()))}
    >>> updates, _ = tx.update({"w": 1.0}, tx.init(params), params)
    >>> updates
    {'w': 6.0}
    """
    sequence = _in_sequence({str(i): arg for i, arg in enumerate(args)})

    def update_fn(
        updates: NestedTensor,
        state: tuple,
        params: NestedOptParam,
        **extra_args: Any,
    ) -> tuple[NestedTensor, tuple]:
        states = {str(i): part_state for i, part_state in enumerate(state)}
        updates, states = update_with(
            sequence, updates, states, params, extra_args
        )
        return updates, tuple(states.values())

    return PartitionedGradientTransformationExtraArgs(
        init=lambda params: tuple(sequence.init(params).values()),
        update=update_fn,
        partition=lambda param_specs: tuple(
            sequence.partition(param_specs).values()
        ),
    )


def named_chain(
    **kwargs: TransformationLike,
) -> PartitionedGradientTransformation:
    """Chains transformations like `chain`, with a state that is a dict by their names.

    >>> tx = named_chain(double=optax.scale(2.0), momentum=optax.trace(0.9))
    >>> sorted(tx.init({"w": OptParam(value=jnp.zeros(()))}))
    ['double', 'momentum']
    """
    return _in_sequence(kwargs)


def _in_sequence(
    transformations: Mapping[str, TransformationLike],
) -> PartitionedGradientTransformation:
    # An immutable tuple, such that chains of equal parts compare equal.
    parts = tuple(
        (name, as_partitioned(part)) for name, part in transformations.items()
    )

    def update_fn(
        updates: NestedTensor,
        state: dict[str, Any],
        params: NestedOptParam,
        **extra_args: Any,
    ) -> tuple[NestedTensor, dict[str, Any]]:
        new_state = {}
        for name, part in parts:
            updates, new_state[name] = update_with(
                part, updates, state[name], params, extra_args
            )
        return updates, new_state

    return PartitionedGradientTransformationExtraArgs(
        init=lambda params: {name: part.init(params) for name, part in parts},
        update=update_fn,
        partition=lambda specs: {
            name: part.partition(specs) for name, part in parts
        },
    )
