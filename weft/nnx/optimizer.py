"""Optimizers, which update a model in place, and moving averages of its variables.

An optimizer is an optax transformation whose state is in variables: those of a parameter have its
metadata, so that they are sharded like the parameter, or by its `optimizer_sharding`; other state
has no metadata. An update calls the transformation on plain arrays, and writes nothing if it
raises.

A `State` can change unnoticed, so a call that remembers an object's structure would have to check
it each time. Optimizers and averages keep their state per parameter in a `StateDict` instead.

`TrainState` suits functional training loops; `Optimizer` suits loops that change objects in place.
"""

from __future__ import annotations

import warnings
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp

from weft import errors, struct
from weft.core.spmd import without_format
from weft.functional.statistics import update_running_average
from weft.nnx import pytree, refs, split_merge
from weft.nnx.containers import Dict, List
from weft.nnx.eager_sharding import mesh_of, shard_new_value, with_out_sharding
from weft.nnx.filters import Filter, Path, to_predicate
from weft.nnx.graph import GraphDef, build_graph, flatten_graph
from weft.nnx.pytree import (
    Pytree,
    children,
    data_children,
    is_array,
    iter_graph,
    static,
)
from weft.nnx.state import (
    State,
    from_flat_state,
    path_text,
    to_flat_state,
    value_at,
)
from weft.nnx.update import update
from weft.nnx.variables import Param, Variable
from weft.typing import ArrayLike, PyTree

if TYPE_CHECKING:
    import optax


A = TypeVar("A")
M = TypeVar("M")
_MISSING: Any = object()


class OptState(Variable[A]):
    """Part of the state of an optimizer."""

    __slots__ = ()


class OptArray(OptState[A]):
    """Optimizer state that belongs to no parameter, such as a count."""

    __slots__ = ()


class OptVariable(OptState[A]):
    """Optimizer state of a parameter, with the parameter's metadata."""

    __slots__ = ()


def to_opt_state(
    tree: PyTree, shapes: Mapping[Path, tuple[int, ...]] | None = None
) -> PyTree:
    """Returns a transformation's state with variables as leaves.

    State whose shape differs from its parameter's, in `shapes`, loses axis names that do not fit.

    >>> params = nnx.State({"w": nnx.Param(jnp.ones(2))})
    >>> state = to_opt_state(optax.adam(0.1).init(params))
    >>> type(state[0].count).__name__, type(state[0].mu.w).__name__
    ('OptArray', 'OptVariable')
    """
    parameter_shapes = shapes or {}

    def make(path: Path, leaf: PyTree) -> OptState[Any]:
        if isinstance(leaf, Variable):
            return _opt_variable(leaf, parameter_shapes.get(path))
        return OptArray(leaf)

    return to_state_dict(tree, make)


def _opt_variable(
    state: Variable[Any], parameter_shape: tuple[int, ...] | None
) -> OptVariable[Any]:
    """Returns the state of a parameter, which optax has given the parameter's own metadata."""
    value = raw_value(state)
    metadata = dict(state._metadata)
    metadata.pop("mutable", None)
    optimizer_sharding = metadata.pop("optimizer_sharding", None)
    if optimizer_sharding is not None:
        metadata["out_sharding"] = optimizer_sharding
        metadata = with_out_sharding(metadata, "OptVariable")
    axes = without_format(metadata.get("out_sharding"))
    has_other_shape = False
    if is_array(value) and parameter_shape is not None:
        has_other_shape = value.shape != parameter_shape
    if axes is not None and has_other_shape:
        del metadata["out_sharding"]
        # L-BFGS keeps the parameter's values of the last steps along a first axis.
        is_history = value.shape[1:] == parameter_shape
        if is_history and not isinstance(axes, jax.sharding.Sharding):
            metadata["out_sharding"] = (None, *axes)
    if optimizer_sharding is not None and "out_sharding" in metadata:
        value = shard_new_value(value, metadata, "OptVariable")
    return OptVariable.from_metadata(refs.to_ref(value, metadata), metadata)


class Optimizer(Pytree, Generic[M]):
    """Optimizer that updates the parameters of a model with an optax transformation.

    Args:
        model: model, or any pytree of variables.
        wrt: filter of the parameters, which are variables or arrays.

    Attributes:
        opt_state: state of the transformation, with variables as leaves.

    Raises:
        TransformationTypeError: if `tx` is not a transformation.
        OptimizerCallError: without `wrt`.

    Warns with OptimizerWarning if `wrt` matches nothing in the model.

    >>> model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    >>> optimizer = Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    >>> _ = optimizer.update(model, nnx.State({"w": jnp.ones(2)}))
    >>> model.w.tolist(), int(optimizer.step)
    ([0.5, 0.5], 1)
    """

    def __init__(
        self,
        model: M,
        tx: "optax.GradientTransformation",
        *,
        wrt: Filter = _MISSING,
        graph: bool | None = None,
    ):
        if wrt is _MISSING:
            raise errors.OptimizerCallError(
                "an optimizer needs wrt, the filter of the parameters to update; use "
                "nnx.Optimizer(model, tx, wrt=nnx.Param)."
            )
        if not (
            callable(getattr(tx, "init", None))
            and callable(getattr(tx, "update", None))
        ):
            raise errors.TransformationTypeError(
                f"tx is {tx!r}, which has no init and update; give a transformation of optax, such "
                "as optax.adam(1e-3)."
            )
        self.step = OptState(jnp.array(0, jnp.uint32))
        self.tx = static(tx)
        # Static attributes are hashed, so a list of filters becomes a tuple.
        self.wrt = static(tuple(wrt) if isinstance(wrt, list) else wrt)
        parameters: dict[Path, PyTree] = {}
        shapes: dict[Path, tuple[int, ...]] = {}
        for path, parameter in _parameters(model, self.wrt).items():
            value = raw_value(parameter)
            if is_array(value):
                shapes[path] = value.shape
            if isinstance(parameter, Variable):
                # Without `jax.Ref`, since transformations look into variables.
                parameter = type(parameter).from_metadata(
                    value, parameter._metadata
                )
            parameters[path] = parameter
        opt_state = tx.init(from_flat_state(parameters))
        self.opt_state = to_opt_state(opt_state, shapes)

    def update(
        self, model: M, grads: PyTree = _MISSING, /, **kwargs: PyTree
    ) -> PyTree:
        """Updates the parameters of a model; returns the change of each, a state of arrays.

        Args:
            grads: gradients, at the paths of the parameters: a state, nested dicts, or a model.
                Those that `wrt` does not match are ignored.
            **kwargs: extra arguments of the transformation, such as `value`; variables give values.

        Raises:
            GradientStructureError: if paths or shapes of gradients and parameters differ.
            OptimizerStateError: if the optimizer was made for other parameters.
            ImmutableVariableError: if a parameter is immutable.
            OptimizerCallError: without gradients.
        """
        if grads is _MISSING:
            raise errors.OptimizerCallError(
                "update was given one argument; give the model and the gradients, as in "
                "optimizer.update(model, grads), or use nnx.ModelAndOptimizer."
            )
        parameters = _parameters(model, self.wrt)
        values = {path: raw_value(x) for path, x in parameters.items()}
        params = from_flat_state(values)
        opt_state = from_state_dict(self.opt_state)
        _check_mutable(parameters)
        gradients = gradients_like(parameters, grads, self.wrt)
        try:
            updates, new_opt_state = self.tx.update(
                gradients, opt_state, params, **split_merge.as_pure(kwargs)
            )
        except (TypeError, ValueError):
            # optax says that structures differ, but not where.
            _check_parameters(self.opt_state, parameters)
            raise
        import optax  # local: optax would double the import time of this package

        new_params = optax.apply_updates(params, updates)
        # All new values exist before the first is written, so that a failure changes nothing.
        new_values = list(zip_state_dict(self.opt_state, new_opt_state))
        new_arrays: dict[Path, PyTree] = {}
        for path, parameter in parameters.items():
            new_value = value_at(new_params, path)
            if isinstance(parameter, Variable):
                new_value = _sharded_like(parameter, new_value)
                new_values.append((parameter, new_value))
            else:
                new_arrays[path] = new_value
        for variable, value in new_values:
            variable.set_raw_value(value)
        if new_arrays:
            update(model, from_flat_state(new_arrays))
        self.step.set_raw_value(raw_value(self.step) + 1)
        return updates


class ModelAndOptimizer(Optimizer[M]):
    """Optimizer that holds the model; arguments as for `Optimizer`.

    >>> both = ModelAndOptimizer(nnx.Dict(w=nnx.Param(jnp.ones(2))), optax.sgd(0.5))
    >>> _ = both.update(nnx.State({"w": jnp.ones(2)}))
    >>> both.model.w.tolist()
    [0.5, 0.5]
    """

    def __init__(
        self,
        model: M,
        tx: "optax.GradientTransformation",
        *,
        wrt: Filter = Param,
    ):
        super().__init__(model, tx, wrt=wrt)
        self.model = model

    def update(self, grads: PyTree, /, **kwargs: PyTree) -> PyTree:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates the parameters of the model; see `Optimizer.update`."""
        return super().update(self.model, grads, **kwargs)


def _sharded_like(parameter: Variable[Any], value: PyTree) -> PyTree:
    """Returns a new value sharded like the parameter; the state may span more devices."""
    metadata = parameter._metadata
    for layout in ("optimizer_sharding", "out_sharding"):
        if metadata.get(layout) is None:
            return value
    if mesh_of(metadata) is None:
        return value
    return shard_new_value(value, metadata, type(parameter).__name__)


def _parameters(model: PyTree, wrt: Filter) -> dict[Path, PyTree]:
    """Returns the variables and arrays to update; warns if there are none."""
    matches = to_predicate(wrt)
    parameters: dict[Path, PyTree] = {}
    for path, leaf in leaves_by_path(model, once=True).items():
        can_update = isinstance(leaf, Variable) or is_array(leaf)
        if can_update and matches(path, leaf):
            parameters[path] = leaf
    if not parameters:
        class_names: set[str] = set()
        for _, x in iter_graph(model):
            if isinstance(x, Variable):
                class_names.add(type(x).__name__)
        warnings.warn(
            f"wrt={wrt!r} matches nothing in {type(model).__name__}; the kinds of its variables "
            f"are {', '.join(sorted(class_names)) or '(none)'}.",
            errors.OptimizerWarning,
            stacklevel=3,
        )
    return parameters


def _check_mutable(parameters: dict[Path, PyTree]) -> None:
    for path, x in parameters.items():
        if isinstance(x, Variable) and not x.get_metadata("mutable", True):
            raise errors.ImmutableVariableError(
                f"{type(x).__name__} at {path_text(path)!r}"
            )


def _check_parameters(
    opt_state: PyTree, parameters: dict[Path, PyTree]
) -> None:
    """Raises OptimizerStateError if a state per parameter has not the paths of the parameters."""
    for _, x in iter_graph(opt_state):
        if not isinstance(x, StateDict):
            continue
        state_paths = set(to_flat_state(x).paths)
        unmatched_paths = state_paths ^ parameters.keys()
        if not unmatched_paths:
            continue
        path = min(unmatched_paths, key=str)
        has, lacks = "the model", "the state of the optimizer"
        if path in state_paths:
            has, lacks = "the optimizer", "the model"
        raise errors.OptimizerStateError(
            f"{has} has {path_text(path)!r} among the parameters and {lacks} does not; make "
            "the optimizer for the model that it updates."
        ) from None


class StateDict(Dict):
    """Dict with the structure of a `State`; arguments as for `dict`.

    >>> state = StateDict({"layer": {"kernel": nnx.Param(1.0)}})
    >>> state.layer.kernel[...], state["layer"]["kernel"][...]
    (1.0, 1.0)
    """


def to_state_dict(
    tree: PyTree, make: Callable[[Path, Any], PyTree], path: Path = ()
) -> PyTree:
    """Returns a pytree with variables `make(path, leaf)` as leaves, in change-tracking containers.

    States become a `StateDict`, lists and dicts a `List` and a `Dict`; `path` prefixes all paths.

    >>> to_state_dict({"count": 0}, lambda path, x: nnx.Variable(x)).count[...]
    0
    """

    def converted(
        items: Iterable[tuple[Hashable, PyTree]], path: Path
    ) -> dict[Hashable, PyTree]:
        return {
            name: to_state_dict(x, make, (*path, name)) for name, x in items
        }

    if isinstance(tree, Variable):
        return make(path, tree)
    tree_type = type(tree)
    if tree_type is State:
        # Its paths are those of the parameters, wherever it is in the transformation's state.
        return StateDict(converted(tree.raw_mapping.items(), ()))
    if tree_type is dict:
        return Dict(converted(tree.items(), path))
    if tree_type is list:
        return List(converted(enumerate(tree), path).values())
    parts, structure = jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)
    if parts and parts[0] is tree:
        return make(path, tree)
    converted_parts = converted(enumerate(parts), path).values()
    return jax.tree.unflatten(structure, converted_parts)


def raw_value(x: PyTree) -> PyTree:
    """Returns the value of a variable without hooks; other leaves are unchanged."""
    return x._read() if isinstance(x, Variable) else x


def from_state_dict(tree: PyTree) -> PyTree:
    """Returns the pytree given to `to_state_dict`, with the variables' current values."""
    if isinstance(tree, Variable):
        return raw_value(tree)
    if isinstance(tree, Dict):
        values = {name: from_state_dict(value) for name, value in tree.items()}
        is_state = isinstance(tree, StateDict)
        return State(values, _copy=False) if is_state else values
    if isinstance(tree, List):
        return [from_state_dict(value) for value in tree]
    named_parts = data_children(tree)
    if not named_parts:
        return tree
    parts = [from_state_dict(part) for _, part in named_parts]
    return pytree.with_children(tree, parts)


def zip_state_dict(
    tree: PyTree, values: PyTree, path: Path = ()
) -> Iterator[tuple[Variable[Any], PyTree]]:
    """Yields the variables of a result of `to_state_dict`, each with its value in another pytree.

    Raises OptimizerStateError if the structures differ.
    """
    if isinstance(tree, Variable):
        yield tree, values
        return
    parts = dict(children(tree))
    value_parts = dict(children(values))
    if parts.keys() != value_parts.keys():
        names = ", ".join(map(str, parts)) or "nothing"
        value_names = ", ".join(map(str, value_parts)) or repr(values)
        raise errors.OptimizerStateError(
            f"the state of the optimizer has {names} at {path_text(path) or 'its root'!r}, but "
            f"its transformation returned {value_names} for it; an update must return a state "
            "with the structure that init returned."
        )
    for name, part in parts.items():
        yield from zip_state_dict(part, value_parts[name], (*path, name))


def leaves_by_path(
    tree: PyTree, once: bool | None = None
) -> dict[Path, PyTree]:
    """Returns the variables and other leaves of a model, a state or nested dicts, by path.

    With `once`, the default for objects, a repeated variable has only its first path.
    """
    if once is None:
        once = isinstance(tree, Pytree)
    leaf_by_path: dict[Path, PyTree] = {}
    visited: set[int] = set()

    def walk(x: PyTree, path: Path) -> None:
        is_variable = isinstance(x, Variable)
        if isinstance(x, Pytree) or (once and is_variable):
            if id(x) in visited:
                return
            visited.add(id(x))
        if is_variable or is_array(x):
            leaf_by_path[path] = x
            return
        parts = data_children(x)
        for name, part in parts:
            walk(part, (*path, name))
        # Neither an empty container nor an object without data is a leaf.
        is_empty = x is None or isinstance(x, Mapping | Sequence | Pytree)
        if not parts and not is_empty:
            leaf_by_path[path] = x

    walk(tree, ())
    return leaf_by_path


def gradients_like(
    parameters: Mapping[Path, PyTree], grads: PyTree, wrt: Filter
) -> State:
    """Returns the values of gradients, as a state with the paths of the parameters.

    `grads` is a state, nested dicts or a model; those that `wrt` does not match are ignored. Raises
    GradientStructureError if paths or shapes of gradients and parameters differ.

    >>> w, grads = nnx.Param(jnp.ones(2)), {"w": jnp.zeros(2), "n": 1.0}
    >>> nnx.to_pure_dict(gradients_like({("w",): w}, grads, nnx.Param))
    {'w': Array([0., 0.], dtype=float32)}
    """
    gradient_by_path = leaves_by_path(grads)
    like_parameters: dict[Path, PyTree] = {}
    for path, parameter in parameters.items():
        gradient = raw_value(gradient_by_path.get(path))
        _check_gradient(path, raw_value(parameter), gradient, wrt)
        like_parameters[path] = gradient
    matches = to_predicate(wrt)
    for path, gradient in gradient_by_path.items():
        is_variable = isinstance(gradient, Variable)
        if path not in parameters and is_variable and matches(path, gradient):
            raise errors.GradientStructureError(
                f"there is a gradient for {path_text(path)!r}, but no parameter there, or the "
                "same one as at another path; give the gradients with respect to the variables of "
                "the model itself."
            )
    return from_flat_state(like_parameters)


def _check_gradient(
    path: Path, parameter: PyTree, gradient: PyTree, wrt: Filter
) -> None:
    """Raises GradientStructureError for a missing gradient, or one of another shape."""
    if gradient is None and parameter is not None:
        filter_name = wrt.__name__ if isinstance(wrt, type) else wrt
        raise errors.GradientStructureError(
            f"there is no gradient for {path_text(path)!r}, a parameter that the filter "
            f"{filter_name} selects; take the gradients with argnums=nnx.DiffState(0, "
            f"{filter_name})."
        )
    shape = getattr(parameter, "shape", None)
    gradient_shape = getattr(gradient, "shape", None)
    if shape is None or gradient_shape is None:
        return
    if shape != gradient_shape:
        raise errors.GradientStructureError(
            f"the gradient for {path_text(path)!r} has shape {gradient_shape}, and the parameter "
            f"{shape}; give the gradient of a scalar loss with respect to it."
        )


class EMA(Pytree):
    """Exponential moving average of each variable of a model.

    Args:
        params: model or state that provides the initial values.
        decay: weight of the old average in an update; an array if it should change.

    Attributes:
        params: averages, variables at the model's paths.

    Raises AverageLeafError if the filter matches an array that is not a variable, or keys.

    >>> model = nnx.Dict(w=nnx.Param(jnp.zeros(2)))
    >>> ema = EMA(model, decay=0.75)
    >>> model.w[...] = 4.0
    >>> ema.update(model)
    >>> ema.apply_to(model).w.tolist()
    [1.0, 1.0]
    """

    def __init__(
        self,
        params: PyTree,
        decay: float,
        *,
        only: Filter = ...,
        graph: bool | None = None,
    ):
        self.decay = decay
        self.filter = static(tuple(only) if isinstance(only, list) else only)
        initial_values = split_merge.state(params, self.filter)
        self.params = to_state_dict(initial_values, _initial_average)

    def update(self, updates: PyTree) -> None:
        """Updates the averages: `average = decay * average + (1 - decay) * value`.

        Raises AverageStructureError if paths or shapes differ from those of the averages.
        """
        leaf_by_path = leaves_by_path(updates)
        averages = dict(to_flat_state(self.params))
        matches = to_predicate(self.filter)
        for path, leaf in leaf_by_path.items():
            if path not in averages and matches(path, leaf):
                raise errors.AverageStructureError(
                    f"there is a value for {path_text(path)!r}, but no average; update with the "
                    "variables that the averages were made of."
                )
        new_averages: dict[Path, PyTree] = {}
        for path, average in averages.items():
            if path not in leaf_by_path:
                raise errors.AverageStructureError(
                    f"there is an average for {path_text(path)!r}, but no value; update with the "
                    "variables that the averages were made of."
                )
            value = raw_value(leaf_by_path[path])
            new_averages[path] = self._averaged(path, raw_value(average), value)
        for path, average in averages.items():
            average.set_raw_value(new_averages[path])

    def _averaged(self, path: Path, average: PyTree, value: PyTree) -> PyTree:
        shape = jax.tree.map(jnp.shape, value)
        average_shape = jax.tree.map(jnp.shape, average)
        if shape != average_shape:
            raise errors.AverageStructureError(
                f"the value for {path_text(path)!r} has shape {shape}, and its average "
                f"{average_shape}; update with the variables that the averages were made of."
            )

        def averaged_leaf(average: ArrayLike, value: jax.Array) -> jax.Array:
            return update_running_average(
                jnp.asarray(average), value, decay=self.decay
            )

        return jax.tree.map(averaged_leaf, average, value)

    def apply_to(self, model: M) -> M:
        """Returns a copy of the model with the averages as values; other variables are shared.

        >>> model = nnx.Dict(w=nnx.Param(1.0))
        >>> EMA(model, 0.5).apply_to(model).w is model.w
        False
        """
        averages = dict(to_flat_state(self.params))
        flat = flatten_graph(model)
        leaves = [averages.get(path, leaf) for path, leaf in flat.items()]
        averaged_model, _ = build_graph(flat.graphdef, leaves, share=True)
        return averaged_model


def _initial_average(path: Path, x: PyTree) -> Variable[Any]:
    if not isinstance(x, Variable):
        raise errors.AverageLeafError(
            f"there is a {type(x).__name__} at {path_text(path)!r}, and only variables have "
            "averages; make it a variable, or give only=nnx.Param."
        )
    for leaf in jax.tree.leaves(raw_value(x)):
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            raise errors.AverageLeafError(
                f"the {type(x).__name__} at {path_text(path)!r} has keys of a random number "
                "generator, which have no average; give only=nnx.Param to average the parameters."
            )
    return x.copy()


class TrainState(struct.PyTreeNode):
    """State of a simple training loop; derive from it to add fields.

    >>> graphdef, params = nnx.split(nnx.Dict(w=nnx.Param(jnp.ones(2))))
    >>> train_state = TrainState.create(graphdef, params=params, tx=optax.sgd(0.5))
    >>> train_state = train_state.apply_gradients(params)
    >>> int(train_state.step), train_state.params.w.tolist()
    (1, [0.5, 0.5])
    """

    graphdef: GraphDef
    params: State
    opt_state: "optax.OptState"
    step: jax.Array
    tx: "optax.GradientTransformation" = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        graphdef: GraphDef,
        *,
        params: State,
        tx: "optax.GradientTransformation",
        step: int = 0,
        **kwargs: PyTree,
    ) -> Self:
        """Creates a state with initial optimizer state; `kwargs` are fields of a derived class."""
        return cls(
            graphdef=graphdef,
            params=params,
            opt_state=tx.init(params),
            step=jnp.asarray(step),
            tx=tx,
            **kwargs,
        )

    def apply(self, state: State | str, *states: State | str) -> Any:
        """Calls a method of the model purely; see `nnx.call`.

        A state may be given by the name of a field; further states are merged with it.

        >>> graphdef, params = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
        >>> state = TrainState.create(graphdef, params=params, tx=optax.sgd(0.5))
        >>> y, _ = state.apply("params")(jnp.ones((1, 3)))
        >>> y.shape
        (1, 2)
        """
        parts: list[State] = []
        for part in (state, *states):
            parts.append(getattr(self, part) if isinstance(part, str) else part)
        return self.graphdef.apply(*parts)

    def apply_gradients(self, grads: State, **kwargs: PyTree) -> Self:
        """Returns the state after one optimizer step.

        Args:
            grads: gradients, at the paths of the parameters; variables or arrays.
            **kwargs: other fields to replace.

        Raises GradientStructureError if paths or shapes of gradients and parameters differ.
        """
        parameters = dict(to_flat_state(self.params))
        # optax maps over gradients and parameters, so both have variables at the same places.
        gradients: dict[Path, PyTree] = {}
        for path, value in to_flat_state(
            gradients_like(parameters, grads, ...)
        ):
            parameter = parameters[path]
            if isinstance(parameter, Variable):
                value = parameter.replace(value)
            gradients[path] = value
        updates, opt_state = self.tx.update(
            from_flat_state(gradients), self.opt_state, self.params
        )
        import optax  # local: optax would double the import time of this package

        params = optax.apply_updates(self.params, updates)
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )
