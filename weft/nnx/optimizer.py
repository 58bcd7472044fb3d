"""Optimizers: optax transformations with their state in variables, which update a model in place.

State per parameter is in variables with the parameter's metadata, so that it is sharded like the
parameter, or by its `optimizer_sharding`; other state has no metadata. An update calls the
transformation on plain arrays, and writes nothing if it raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax.numpy as jnp
from jax.sharding import Sharding

from weft.core.spmd import without_format
from weft.errors import (
    ImmutableVariableError,
    OptimizerCallError,
    OptimizerStateError,
    OptimizerWarning,
    TransformationTypeError,
)
from weft.nnx.eager_sharding import laid_out, mesh_of, named_layout
from weft.nnx.filters import Filter, Path, to_predicate
from weft.nnx.gradients import gradients_like
from weft.nnx.graph import is_array, iter_graph
from weft.nnx.kinds import Param
from weft.nnx.pytree import Pytree, static
from weft.nnx.references import held
from weft.nnx.splitting import pure
from weft.nnx.state import State, from_flat_state, shown_path, to_flat_state
from weft.nnx.state_dict import StateDict, kept, leaves_of, matched, raw, values_of
from weft.nnx.updating import update
from weft.nnx.variables import Variable

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


def to_opt_state(tree: Any, shapes: Mapping[Path, tuple[int, ...]] | None = None) -> Any:
    """Returns a transformation's state with variables as leaves.

    State whose shape differs from its parameter's, in `shapes`, loses axis names that do not fit.

    Example:
        >>> import optax
        >>> from weft import nnx
        >>> kept = to_opt_state(optax.adam(0.1).init(nnx.State({"w": nnx.Param(jnp.ones(2))})))
        >>> type(kept[0].count).__name__, type(kept[0].mu.w).__name__
        ('OptArray', 'OptVariable')
    """
    shapes = shapes or {}

    def make(path: Path, x: Any) -> OptState[Any]:
        if not isinstance(x, Variable):
            return OptArray(x)
        value, metadata = raw(x), x.get_metadata()
        metadata.pop("mutable", None)
        own = metadata.pop("optimizer_sharding", None)
        if own is not None:
            metadata = named_layout({**metadata, "out_sharding": own}, "OptVariable")
        shape, axes = getattr(value, "shape", None), without_format(metadata.get("out_sharding"))
        if axes is not None and path in shapes and shape not in (None, shapes[path]):
            del metadata["out_sharding"]
            if shape[1:] == shapes[path] and not isinstance(axes, Sharding):
                metadata["out_sharding"] = (None, *axes)  # history over the last steps
        if own is not None and "out_sharding" in metadata:
            value = laid_out(value, metadata, "OptVariable")
        return OptVariable.from_metadata(held(value, metadata), metadata)

    return kept(tree, make)


class Optimizer(Pytree, Generic[M]):
    """Optimizer that updates the parameters of a model with an optax transformation.

    Args:
        model: model, or any pytree of variables.
        wrt: filter of the parameters, which are variables or arrays.

    Attributes:
        step: number of updates so far.
        opt_state: state of the transformation, with variables as leaves.

    Raises:
        TransformationTypeError: if `tx` is not a transformation.
        OptimizerCallError: without `wrt`.

    Warns:
        OptimizerWarning: if `wrt` matches nothing in the model.

    Example:
        >>> import optax
        >>> from weft import nnx
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
            raise OptimizerCallError(
                "an optimizer needs wrt, the filter of the parameters to update; use "
                "nnx.Optimizer(model, tx, wrt=nnx.Param)."
            )
        if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
            raise TransformationTypeError(
                f"tx is {tx!r}, which has no init and update; give a transformation of optax, such "
                "as optax.adam(1e-3)."
            )
        self.step = OptState(jnp.array(0, jnp.uint32))
        self.tx = static(tx)
        self.wrt = static(tuple(wrt) if isinstance(wrt, list) else wrt)
        parameters = {path: _plain(x) for path, x in _parameters(model, self.wrt).items()}
        shapes = {path: raw(x).shape for path, x in parameters.items() if is_array(raw(x))}
        self.opt_state = to_opt_state(tx.init(from_flat_state(parameters)), shapes)

    def update(self, model: M, grads: Any = _MISSING, /, **kwargs: Any) -> Any:
        """Updates the parameters of a model; returns the change of each, a state of arrays.

        Args:
            grads: gradients, at the paths of the parameters: a state, nested dicts, or a model.
                Those that `wrt` does not match are ignored.
            **kwargs: extra arguments of the transformation, such as `value`, with values for
                variables.

        Raises:
            GradientStructureError: if paths or shapes of gradients and parameters differ.
            OptimizerStateError: if the optimizer was made for other parameters.
            ImmutableVariableError: if a parameter is immutable.
            OptimizerCallError: without gradients.

        Warns:
            OptimizerWarning: if `wrt` matches nothing in the model.
        """
        if grads is _MISSING:
            raise OptimizerCallError(
                "update was given one argument; give the model and the gradients, as in "
                "optimizer.update(model, grads), or use nnx.ModelAndOptimizer."
            )
        parameters = _parameters(model, self.wrt)
        params = from_flat_state((path, raw(x)) for path, x in parameters.items())
        before = values_of(self.opt_state)
        _check_mutable(parameters)
        given = gradients_like(parameters, grads, self.wrt)
        try:
            updates, after = self.tx.update(given, before, params, **pure(kwargs))
        except (TypeError, ValueError):
            _check_parameters(self.opt_state, parameters)
            raise
        import optax  # local: optax would double the import time of this package

        moved = optax.apply_updates(params, updates)
        changes = list(matched(self.opt_state, after))
        arrays: list[tuple[Path, Any]] = []
        for path, x in parameters.items():
            if isinstance(x, Variable):
                changes.append((x, _laid_out_as_before(x, _at(moved, path))))
            else:
                arrays.append((path, _at(moved, path)))
        for variable, value in changes:
            variable.set_raw_value(value)
        if arrays:
            update(model, from_flat_state(arrays))
        self.step.set_raw_value(self.step.get_raw_value() + 1)
        return updates


class ModelAndOptimizer(Optimizer[M]):
    """Optimizer that holds the model; arguments as for `Optimizer`.

    Example:
        >>> import optax
        >>> from weft import nnx
        >>> both = ModelAndOptimizer(nnx.Dict(w=nnx.Param(jnp.ones(2))), optax.sgd(0.5))
        >>> _ = both.update(nnx.State({"w": jnp.ones(2)}))
        >>> both.model.w.tolist()
        [0.5, 0.5]
    """

    def __init__(self, model: M, tx: "optax.GradientTransformation", *, wrt: Filter = Param):
        super().__init__(model, tx, wrt=wrt)
        self.model = model

    def update(self, grads: Any, /, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates the parameters of the model; see `Optimizer.update`."""
        return super().update(self.model, grads, **kwargs)


def _plain(x: Any) -> Any:
    """Returns a variable without `jax.Ref`, since transformations look into variables."""
    return type(x).from_metadata(raw(x), x.get_metadata()) if isinstance(x, Variable) else x


def _at(tree: Any, path: Path) -> Any:
    at = tree.raw_mapping if isinstance(tree, State) else tree
    for part in path:
        at = at[part]
    return at


def _laid_out_as_before(parameter: Variable[Any], value: Any) -> Any:
    """Returns a new value sharded like the parameter; the state may span more devices."""
    metadata = parameter.get_metadata()
    layouts = [metadata.get(name) for name in ("optimizer_sharding", "out_sharding")]
    if None in layouts or mesh_of(metadata) is None:
        return value
    return laid_out(value, metadata, type(parameter).__name__)


def _parameters(model: Any, wrt: Filter) -> dict[Path, Any]:
    matches = to_predicate(wrt)
    found = {
        path: x
        for path, x in leaves_of(model, once=True).items()
        if (isinstance(x, Variable) or is_array(x)) and matches(path, x)
    }
    if isinstance(found.get(()), State):  # one without entries
        found = {}
    if not found:
        there = sorted({type(x).__name__ for _, x in iter_graph(model) if isinstance(x, Variable)})
        warnings.warn(
            f"wrt={wrt!r} matches nothing in {type(model).__name__}; the kinds of its variables "
            f"are {', '.join(there) or '(none)'}.",
            OptimizerWarning,
            stacklevel=3,
        )
    return found


def _check_mutable(parameters: dict[Path, Any]) -> None:
    for path, x in parameters.items():
        if isinstance(x, Variable) and not x.get_metadata("mutable", True):
            raise ImmutableVariableError(f"{type(x).__name__} at {shown_path(path)!r}")


def _check_parameters(opt_state: Any, parameters: dict[Path, Any]) -> None:
    for _, x in iter_graph(opt_state):
        if isinstance(x, StateDict) and (paths := set(dict(to_flat_state(x)))) != set(parameters):
            path = sorted(paths ^ set(parameters), key=str)[0]
            has, lacks = (
                ("the optimizer", "the model")
                if path in paths
                else ("the model", "the state of the optimizer")
            )
            raise OptimizerStateError(
                f"{has} has {shown_path(path)!r} among the parameters and {lacks} does not; make "
                "the optimizer for the model that it updates."
            ) from None
