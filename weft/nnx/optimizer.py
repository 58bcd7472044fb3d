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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from weft.nnx.pytree import Pytree, children, data_children, is_array, iter_graph, static
from weft.nnx.state import State, from_flat_state, path_text, to_flat_state, value_at
from weft.nnx.update import update
from weft.nnx.variables import Param, Variable

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


def to_opt_state(tree: object, shapes: Mapping[Path, tuple[int, ...]] | None = None) -> Any:
    """Returns a transformation's state with variables as leaves.

    State whose shape differs from its parameter's, in `shapes`, loses axis names that do not fit.

    >>> params = nnx.State({"w": nnx.Param(jnp.ones(2))})
    >>> state = to_opt_state(optax.adam(0.1).init(params))
    >>> type(state[0].count).__name__, type(state[0].mu.w).__name__
    ('OptArray', 'OptVariable')
    """
    shapes = shapes or {}

    def make(path: Path, x: object) -> OptState[Any]:
        if not isinstance(x, Variable):
            return OptArray(x)
        value, metadata = raw_value(x), dict(x._metadata)
        metadata.pop("mutable", None)
        own = metadata.pop("optimizer_sharding", None)
        if own is not None:
            metadata = with_out_sharding({**metadata, "out_sharding": own}, "OptVariable")
        shape, axes = getattr(value, "shape", None), without_format(metadata.get("out_sharding"))
        if axes is not None and path in shapes and shape not in (None, shapes[path]):
            del metadata["out_sharding"]
            if shape[1:] == shapes[path] and not isinstance(axes, jax.sharding.Sharding):
                metadata["out_sharding"] = (None, *axes)  # history over the last steps
        if own is not None and "out_sharding" in metadata:
            value = shard_new_value(value, metadata, "OptVariable")
        return OptVariable.from_metadata(refs.to_ref(value, metadata), metadata)

    return to_state_dict(tree, make)


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
        if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
            raise errors.TransformationTypeError(
                f"tx is {tx!r}, which has no init and update; give a transformation of optax, such "
                "as optax.adam(1e-3)."
            )
        self.step = OptState(jnp.array(0, jnp.uint32))
        self.tx = static(tx)
        self.wrt = static(tuple(wrt) if isinstance(wrt, list) else wrt)
        parameters = {path: _plain(x) for path, x in _parameters(model, self.wrt).items()}
        values = ((path, raw_value(x)) for path, x in parameters.items())
        shapes = {path: x.shape for path, x in values if is_array(x)}
        self.opt_state = to_opt_state(tx.init(from_flat_state(parameters)), shapes)

    def update(self, model: M, grads: object = _MISSING, /, **kwargs: object) -> Any:
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
        params = from_flat_state((path, raw_value(x)) for path, x in parameters.items())
        before = from_state_dict(self.opt_state)
        _check_mutable(parameters)
        given = gradients_like(parameters, grads, self.wrt)
        try:
            updates, after = self.tx.update(given, before, params, **split_merge.as_pure(kwargs))
        except (TypeError, ValueError):
            _check_parameters(self.opt_state, parameters)
            raise
        import optax  # local: optax would double the import time of this package

        moved = optax.apply_updates(params, updates)
        changes = list(zip_state_dict(self.opt_state, after))
        arrays: list[tuple[Path, Any]] = []
        for path, x in parameters.items():
            if isinstance(x, Variable):
                changes.append((x, _sharded_like(x, value_at(moved, path))))
            else:
                arrays.append((path, value_at(moved, path)))
        for variable, value in changes:
            variable.set_raw_value(value)
        if arrays:
            update(model, from_flat_state(arrays))
        self.step.set_raw_value(raw_value(self.step) + 1)
        return updates


class ModelAndOptimizer(Optimizer[M]):
    """Optimizer that holds the model; arguments as for `Optimizer`.

    >>> both = ModelAndOptimizer(nnx.Dict(w=nnx.Param(jnp.ones(2))), optax.sgd(0.5))
    >>> _ = both.update(nnx.State({"w": jnp.ones(2)}))
    >>> both.model.w.tolist()
    [0.5, 0.5]
    """

    def __init__(self, model: M, tx: "optax.GradientTransformation", *, wrt: Filter = Param):
        super().__init__(model, tx, wrt=wrt)
        self.model = model

    def update(self, grads: object, /, **kwargs: object) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates the parameters of the model; see `Optimizer.update`."""
        return super().update(self.model, grads, **kwargs)


def _plain(x: object) -> Any:
    """Returns a variable without `jax.Ref`, since transformations look into variables."""
    return type(x).from_metadata(raw_value(x), x._metadata) if isinstance(x, Variable) else x


def _sharded_like(parameter: Variable[Any], value: object) -> Any:
    """Returns a new value sharded like the parameter; the state may span more devices."""
    metadata = parameter._metadata
    layouts = [metadata.get(name) for name in ("optimizer_sharding", "out_sharding")]
    if None in layouts or mesh_of(metadata) is None:
        return value
    return shard_new_value(value, metadata, type(parameter).__name__)


def _parameters(model: object, wrt: Filter) -> dict[Path, Any]:
    matches = to_predicate(wrt)
    found = {
        path: x
        for path, x in leaves_by_path(model, once=True).items()
        if (isinstance(x, Variable) or is_array(x)) and matches(path, x)
    }
    if not found:
        there = sorted({type(x).__name__ for _, x in iter_graph(model) if isinstance(x, Variable)})
        warnings.warn(
            f"wrt={wrt!r} matches nothing in {type(model).__name__}; the kinds of its variables "
            f"are {', '.join(there) or '(none)'}.",
            errors.OptimizerWarning,
            stacklevel=3,
        )
    return found


def _check_mutable(parameters: dict[Path, Any]) -> None:
    for path, x in parameters.items():
        if isinstance(x, Variable) and not x.get_metadata("mutable", True):
            raise errors.ImmutableVariableError(f"{type(x).__name__} at {path_text(path)!r}")


def _check_parameters(opt_state: object, parameters: dict[Path, Any]) -> None:
    for _, x in iter_graph(opt_state):
        if isinstance(x, StateDict) and (paths := set(dict(to_flat_state(x)))) != set(parameters):
            path = sorted(paths ^ set(parameters), key=str)[0]
            has, lacks = "the model", "the state of the optimizer"
            if path in paths:
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


def to_state_dict(tree: Any, make: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Returns a pytree with variables `make(path, leaf)` as leaves, in change-tracking containers.

    States become a `StateDict`, lists and dicts a `List` and a `Dict`; `path` prefixes all paths.

    >>> to_state_dict({"count": 0}, lambda path, x: nnx.Variable(x)).count[...]
    0
    """
    if isinstance(tree, Variable):
        return make(path, tree)
    kind = type(tree)
    if kind is State:
        mapping = tree.raw_mapping
        return StateDict({name: to_state_dict(x, make, (name,)) for name, x in mapping.items()})
    if kind is dict:
        return Dict({name: to_state_dict(x, make, (*path, name)) for name, x in tree.items()})
    if kind is list:
        return List([to_state_dict(value, make, (*path, i)) for i, value in enumerate(tree)])
    below, structure = jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)
    if below and below[0] is tree:
        return make(path, tree)
    parts = [to_state_dict(value, make, (*path, i)) for i, value in enumerate(below)]
    return jax.tree.unflatten(structure, parts)


def raw_value(x: object) -> Any:
    """Returns the value of a variable without hooks; other leaves are unchanged."""
    return x._read() if isinstance(x, Variable) else x


def from_state_dict(tree: object) -> Any:
    """Returns the pytree given to `to_state_dict`, with the variables' current values."""
    if isinstance(tree, Variable):
        return raw_value(tree)
    if isinstance(tree, Dict):
        values = {name: from_state_dict(value) for name, value in tree.items()}
        return State(values, _copy=False) if isinstance(tree, StateDict) else values
    if isinstance(tree, List):
        return [from_state_dict(value) for value in tree]
    below = data_children(tree)
    return pytree.with_children(tree, [from_state_dict(x) for _, x in below]) if below else tree


def zip_state_dict(
    tree: object, values: object, path: Path = ()
) -> Iterator[tuple[Variable[Any], Any]]:
    """Yields the variables of a result of `to_state_dict`, each with its value in another pytree.

    Raises OptimizerStateError if the structures differ.
    """
    if isinstance(tree, Variable):
        yield tree, values
        return
    there, given = children(tree), dict(children(values))
    if len(there) != len(given) or any(name not in given for name, _ in there):
        names = ", ".join(str(name) for name, _ in there) or "nothing"
        raise errors.OptimizerStateError(
            f"the state of the optimizer has {names} at {path_text(path) or 'its root'!r}, but "
            f"its transformation returned {', '.join(map(str, given)) or repr(values)} for it; an "
            "update must return a state with the structure that init returned."
        )
    for name, value in there:
        yield from zip_state_dict(value, given[name], (*path, name))


def leaves_by_path(tree: object, once: bool | None = None) -> dict[Path, Any]:
    """Returns the variables and other leaves of a model, a state or nested dicts, by path.

    With `once`, the default for objects, a repeated variable has only its first path.
    """
    found: dict[Path, Any] = {}
    seen: set[int] = set()
    once = isinstance(tree, Pytree) if once is None else once

    def walk(x: object, path: Path) -> None:
        if isinstance(x, Pytree) or (once and isinstance(x, Variable)):
            if id(x) in seen:
                return
            seen.add(id(x))
        if isinstance(x, Variable) or is_array(x):
            found[path] = x
        elif below := data_children(x):
            for name, value in below:
                walk(value, (*path, name))
        elif not (x is None or isinstance(x, Mapping | Sequence | Pytree)):
            found[path] = x

    walk(tree, ())
    return found


def gradients_like(parameters: Mapping[Path, Any], grads: object, wrt: Filter) -> State:
    """Returns the values of gradients, as a state with the paths of the parameters.

    `grads` is a state, nested dicts or a model; those that `wrt` does not match are ignored. Raises
    GradientStructureError if paths or shapes of gradients and parameters differ.

    >>> w, grads = nnx.Param(jnp.ones(2)), {"w": jnp.zeros(2), "n": 1.0}
    >>> nnx.to_pure_dict(gradients_like({("w",): w}, grads, nnx.Param))
    {'w': Array([0., 0.], dtype=float32)}
    """
    given = leaves_by_path(grads)
    for path, x in parameters.items():
        _check_gradient(path, raw_value(x), raw_value(given.get(path)), wrt)
    matches = to_predicate(wrt)
    for path, x in given.items():
        if path not in parameters and isinstance(x, Variable) and matches(path, x):
            raise errors.GradientStructureError(
                f"there is a gradient for {path_text(path)!r}, but no parameter there, or the "
                "same one as at another path; give the gradients with respect to the variables of "
                "the model itself."
            )
    return from_flat_state((path, raw_value(given.get(path))) for path in parameters)


def _check_gradient(path: Path, parameter: object, gradient: object, wrt: Filter) -> None:
    if gradient is None and parameter is not None:
        name = wrt.__name__ if isinstance(wrt, type) else wrt
        raise errors.GradientStructureError(
            f"there is no gradient for {path_text(path)!r}, a parameter that the filter {name} "
            f"selects; take the gradients with argnums=nnx.DiffState(0, {name})."
        )
    shape, size = getattr(parameter, "shape", None), getattr(gradient, "shape", None)
    if shape is not None and size is not None and shape != size:
        raise errors.GradientStructureError(
            f"the gradient for {path_text(path)!r} has shape {size}, and the parameter {shape}; "
            "give the gradient of a scalar loss with respect to it."
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
        self, params: object, decay: float, *, only: Filter = ..., graph: bool | None = None
    ):
        self.decay = decay
        self.filter = static(tuple(only) if isinstance(only, list) else only)
        self.params = to_state_dict(split_merge.state(params, self.filter), _average)

    def update(self, updates: object) -> None:
        """Updates the averages: `average = decay * average + (1 - decay) * value`.

        Raises AverageStructureError if paths or shapes differ from those of the averages.
        """
        given, averages = leaves_by_path(updates), dict(to_flat_state(self.params))
        matches = to_predicate(self.filter)
        for path, x in given.items():
            if path not in averages and matches(path, x):
                raise errors.AverageStructureError(
                    f"there is a value for {path_text(path)!r}, but no average; update with the "
                    "variables that the averages were made of."
                )
        moved = [
            (average, self._averaged(path, raw_value(average), given))
            for path, average in averages.items()
        ]
        for average, value in moved:
            average.set_raw_value(value)

    def _averaged(self, path: Path, average: Any, given: dict[Path, Any]) -> Any:
        if path not in given:
            raise errors.AverageStructureError(
                f"there is an average for {path_text(path)!r}, but no value; update with the "
                "variables that the averages were made of."
            )
        value = raw_value(given[path])
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (average, value)]
        if shapes[0] != shapes[1]:
            raise errors.AverageStructureError(
                f"the value for {path_text(path)!r} has shape {shapes[1]}, and its average "
                f"{shapes[0]}; update with the variables that the averages were made of."
            )

        def mean(a: Any, x: Any) -> jax.Array:
            return update_running_average(jnp.asarray(a), x, decay=self.decay)

        return jax.tree.map(mean, average, value)

    def apply_to(self, model: M) -> M:
        """Returns a copy of the model with the averages as values; other variables are shared.

        >>> model = nnx.Dict(w=nnx.Param(1.0))
        >>> EMA(model, 0.5).apply_to(model).w is model.w
        False
        """
        averages = dict(to_flat_state(self.params))
        flat = flatten_graph(model)
        leaves = [averages.get(path, leaf) for path, leaf in flat.items()]
        return build_graph(flat.graphdef, leaves, share=True)[0]


def _average(path: Path, x: object) -> Any:
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
        **kwargs: object,
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
        found = [getattr(self, s) if isinstance(s, str) else s for s in (state, *states)]
        return self.graphdef.apply(*found)

    def apply_gradients(self, grads: State, **kwargs: object) -> Self:
        """Returns the state after one optimizer step.

        Args:
            grads: gradients, at the paths of the parameters; variables or arrays.
            **kwargs: other fields to replace.

        Raises GradientStructureError if paths or shapes of gradients and parameters differ.
        """
        parameters = dict(to_flat_state(self.params))
        values = to_flat_state(gradients_like(parameters, grads, ...))
        like = from_flat_state(
            (path, x.replace(value) if isinstance(x := parameters[path], Variable) else value)
            for path, value in values
        )
        updates, opt_state = self.tx.update(like, self.opt_state, self.params)
        import optax  # local: optax would double the import time of this package

        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)
