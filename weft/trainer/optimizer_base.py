"""What an optimizer is: three pure functions, and how such functions are put together.

    state   = init(params)                       params: a tree of OptParam
    updates, state = update(updates, state, params)
    specs   = partition(param_specs)             laid out as state, each leaf a TensorSpec

The first two are those of optax, except that a parameter comes with what its layer says about it.
The third says how the state is laid out on the mesh before there is any state. A plain optax
transformation stands in wherever such an optimizer is expected; its third function is derived from
its first.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from weft.config import maybe_instantiate
from weft.errors import TransformationTypeError
from weft.hierarchy.base_layer import FactorizationSpec, NestedParameterSpec, TensorSpec
from weft.hierarchy.module import current_context
from weft.typing import DType, Nested, NestedTensor, Shape, Tensor


@dataclasses.dataclass(frozen=True)
class OptParam:
    """A parameter as an optimizer sees it; a leaf of the tree of parameters.

    Attributes:
      value: the array.
      factorization_spec: how statistics of it may be factored; None if they may not.
      weight_decay_scale: the layer's factor for weight decay; None to leave it to the optimizer.
      is_state: whether it is the layer's state, which optimizers leave alone.
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
OptStateSpec = TensorSpec
NestedOptStateSpec = Any  # a pytree laid out as the optimizer's state, with OptStateSpec leaves

TransformInitFn = Callable[[NestedOptParam], Any]
TransformPartitionSpecFn = Callable[[NestedParameterSpec], NestedOptStateSpec]


class TransformUpdateFn(Protocol):
    """Transforms updates, and the state of the transformation."""

    def __call__(
        self, updates: NestedTensor, state: Any, params: NestedOptParam
    ) -> tuple[NestedTensor, Any]:
        """One step.

        Args:
          updates: laid out as `params`; gradients, or what an earlier transformation made of them.
          state: from `init` or from the step before.
          params: before the update.

        Returns:
          The updates, which the last transformation leaves such that they are to be added to the
          parameters, and the new state.
        """
        ...


class PartitionedGradientTransformation(NamedTuple):
    """An optimizer, or a part of one.

    Attributes:
      init: the state for some parameters.
      update: one step.
      partition: the layout of the state, from the specs of the parameters.
    """

    init: TransformInitFn
    update: TransformUpdateFn
    partition: TransformPartitionSpecFn


def opt_param_values(params: NestedOptParam) -> NestedTensor:
    """The arrays of a tree of parameters.

    >>> opt_param_values({"w": OptParam(value=1.0)})
    {'w': 1.0}
    """
    return jax.tree.map(lambda param: param.value, params)


def tree_paths(tree: Any) -> Any:
    """A tree like `tree` that holds at each leaf its path, such as "decoder/emb/weight".

    >>> tree_paths({"a": {"b": 1}, "c": (2, 3)})
    {'a': {'b': 'a/b'}, 'c': ('c/0', 'c/1')}
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path), tree)


def path_name(path: tuple[Any, ...]) -> str:
    """A key path of JAX as names joined by slashes."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def report(name: str, value: Any) -> None:
    """Adds a summary to the invocation under way, if there is one.

    A chain may hold two transformations that report under one name; the later one stands.
    """
    context = current_context()
    if context is not None:
        context.get_summaries()[name] = value


# Partitioning.


def replicated(shape: Shape, dtype: DType) -> OptStateSpec:
    """The spec of an array that every device holds."""
    return TensorSpec(shape=tuple(shape), dtype=dtype, mesh_axes=(None,) * len(shape))


# Any, as it stands in states where an array stands in others.
COUNT_SPEC: Any = replicated((), jnp.int32)


def copy_partition(
    specs: Any, *, pattern: str | re.Pattern | None = None, memory_kind: str | None = None
) -> Any:
    """Specs of arrays that are laid out as those that `specs` describe.

    Args:
      specs: a tree of specs, of parameters or of states.
      pattern: the memory kind is set where it matches the whole path; None for everywhere.
      memory_kind: the memory that holds the arrays; None to leave it as it is.
    """

    def copied(path: tuple[Any, ...], spec: TensorSpec) -> TensorSpec:
        kind = spec.memory_kind
        if memory_kind is not None and (pattern is None or re.fullmatch(pattern, path_name(path))):
            kind = memory_kind
        return TensorSpec(
            shape=spec.shape, dtype=spec.dtype, mesh_axes=spec.mesh_axes, memory_kind=kind
        )

    return jax.tree_util.tree_map_with_path(copied, specs)


def mirrored_partition(init: Callable[[Any], Any]) -> TransformPartitionSpecFn:
    """Derives the layout of a state from the function that makes it.

    A leaf of the state that has the shape of a parameter, and a path that ends with the parameter's
    path, is laid out as the parameter; every other leaf is replicated.

    Args:
      init: makes the state from parameters; it is evaluated abstractly, on their shapes and dtypes.
    """

    def partition(param_specs: NestedParameterSpec) -> NestedOptStateSpec:
        spec_at = dict(jax.tree_util.tree_flatten_with_path(param_specs)[0])
        shapes = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(
                spec.shape, jnp.float32 if spec.dtype is None else spec.dtype
            ),
            param_specs,
        )

        def laid_out(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> OptStateSpec:
            suffixes = (path[i:] for i in range(len(path) + 1))  # the longest first
            spec = next((spec_at[suffix] for suffix in suffixes if suffix in spec_at), None)
            if spec is None or tuple(spec.shape) != leaf.shape:
                return replicated(leaf.shape, leaf.dtype)
            return TensorSpec(shape=leaf.shape, dtype=leaf.dtype, mesh_axes=spec.mesh_axes)

        return jax.tree_util.tree_map_with_path(laid_out, jax.eval_shape(init, shapes))

    return partition


def with_partition_fn(
    base: optax.GradientTransformation, partition_fn: TransformPartitionSpecFn
) -> PartitionedGradientTransformation:
    """An optax transformation, which sees the arrays of the parameters only, with a partition.

    Args:
      base: a transformation of plain arrays.
      partition_fn: the layout of its state.
    """

    def init_fn(params: NestedOptParam) -> Any:
        return base.init(opt_param_values(params))

    def update_fn(updates: NestedTensor, state: Any, params: NestedOptParam) -> tuple[Any, Any]:
        return base.update(updates, state, opt_param_values(params))

    return PartitionedGradientTransformation(init_fn, update_fn, partition_fn)


def as_partitioned(transformation: Any) -> PartitionedGradientTransformation:
    """A transformation with its partition, from either kind of transformation or a config of one.

    Raises:
      TransformationTypeError: if it is neither.
    """
    made = maybe_instantiate(transformation)
    if isinstance(made, PartitionedGradientTransformation):
        return made
    if isinstance(made, optax.GradientTransformation):
        return with_partition_fn(made, mirrored_partition(made.init))
    raise TransformationTypeError(
        "an optimizer is a PartitionedGradientTransformation, an optax.GradientTransformation, or "
        f"a config of one; got {made!r} of type {type(made).__name__}."
    )


def adam_partition(base: optax.GradientTransformation) -> PartitionedGradientTransformation:
    """`optax.scale_by_adam` with both moments laid out as the parameters."""
    return as_partitioned(base)


def trace_partition(base: optax.GradientTransformation) -> PartitionedGradientTransformation:
    """`optax.trace` with the trace laid out as the parameters."""
    return as_partitioned(base)


# Composition.


def stateless(
    update_fn: Callable[[NestedTensor, NestedOptParam], NestedTensor],
) -> PartitionedGradientTransformation:
    """A transformation without state, from a function of updates and parameters."""
    return PartitionedGradientTransformation(
        init=lambda params: optax.EmptyState(),
        update=lambda updates, state, params: (update_fn(updates, params), state),
        partition=lambda param_specs: optax.EmptyState(),
    )


def identity() -> PartitionedGradientTransformation:
    """Leaves updates as they are."""
    return stateless(lambda updates, params: updates)


def chain(*args: Any) -> PartitionedGradientTransformation:
    """One transformation after another; the state is a tuple of theirs.

    Args:
      *args: transformations with or without a partition, or configs of them.

    Raises:
      TransformationTypeError: if one is none of these.

    >>> tx = chain(optax.scale(2.0), optax.scale(3.0))
    >>> params = {"w": OptParam(value=jnp.zeros(()))}
    >>> updates, _ = tx.update({"w": 1.0}, tx.init(params), params)
    >>> updates
    {'w': 6.0}
    """
    sequence = _in_sequence({str(i): arg for i, arg in enumerate(args)})

    def update_fn(
        updates: NestedTensor, state: tuple, params: NestedOptParam
    ) -> tuple[NestedTensor, tuple]:
        states = {str(i): of_part for i, of_part in enumerate(state)}
        updates, states = sequence.update(updates, states, params)
        return updates, tuple(states.values())

    return PartitionedGradientTransformation(
        init=lambda params: tuple(sequence.init(params).values()),
        update=update_fn,
        partition=lambda param_specs: tuple(sequence.partition(param_specs).values()),
    )


def named_chain(**kwargs: Any) -> PartitionedGradientTransformation:
    """`chain`, with a state that is a dict by the names of the transformations.

    >>> tx = named_chain(double=optax.scale(2.0), momentum=optax.trace(0.9))
    >>> sorted(tx.init({"w": OptParam(value=jnp.zeros(()))}))
    ['double', 'momentum']
    """
    return _in_sequence(kwargs)


def _in_sequence(transformations: Mapping[str, Any]) -> PartitionedGradientTransformation:
    # A tuple, which cannot change: so chains of equal parts are equal to who compares functions.
    parts = tuple((name, as_partitioned(part)) for name, part in transformations.items())

    def update_fn(
        updates: NestedTensor, state: dict[str, Any], params: NestedOptParam
    ) -> tuple[NestedTensor, dict[str, Any]]:
        new_state = {}
        for name, part in parts:
            updates, new_state[name] = part.update(updates, state[name], params)
        return updates, new_state

    return PartitionedGradientTransformation(
        init=lambda params: {name: part.init(params) for name, part in parts},
        update=update_fn,
        partition=lambda specs: {name: part.partition(specs) for name, part in parts},
    )
