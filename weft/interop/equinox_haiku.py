"""Layers of Equinox and Haiku in models of Weft.

An Equinox module is a pytree: its floating-point arrays are parameters, other arrays constants,
each at its path in the module. Haiku's module names, such as `mlp/~/linear_0`, are split: each part
is a level of the collections. State of stateful layers is the collection `state` in both.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from weft import errors
from weft.core import display, filters, flat_dict, meta
from weft.interop import models
from weft.typing import PyTree


def _equinox() -> models.Library:
    return models.import_library("equinox", "equinox")


class EquinoxModel(models.Model):
    """An Equinox module.

    Calls receive `key` if accepted, and for a stateful layer `state`, which they return last.

    Args:
        module: the module, a pair of it and its state, with the initial values, or a class.
        **kwargs: for a class, except `key`.
    """

    def __init__(self, module: models.Layer, *args: PyTree, **kwargs: PyTree):
        self.module, self.args, self.kwargs = module, args, kwargs

    @property
    def name(self) -> str:
        module = self.module
        if isinstance(module, tuple):
            module, _ = module
        if isinstance(module, type):
            return module.__name__
        return type(module).__name__

    def _make(self, key: jax.Array | None) -> tuple[Any, Any]:
        """Returns the module and its state; None if it has none."""
        eqx = _equinox()
        if isinstance(self.module, tuple):
            return self.module
        if not isinstance(self.module, type):
            return self.module, None
        kwargs = self.kwargs
        if "key" in models.parameter_names(self.module):
            kwargs = {"key": key, **kwargs}
        make = eqx.nn.make_with_state(self.module)
        module, state = make(*self.args, **kwargs)
        if not jax.tree.leaves(state):
            return module, None
        return module, state

    @functools.cached_property
    def _abstract(self) -> tuple[Any, Any]:
        """The module and its state, with shapes as arrays."""
        eqx = _equinox()
        with jax.ensure_compile_time_eval():
            return eqx.filter_eval_shape(self._make, jax.random.key(0))

    def init(self, rngs, *args, training=None, method=None, **kwargs):
        key = models.single_key(rngs, "params", "default")
        module, state = self._make(key)
        return flat_dict.unflatten_dict(_array_leaves(module, state))

    def apply(
        self,
        variables,
        *args,
        rngs,
        mutable,
        training=None,
        method=None,
        **kwargs,
    ):
        eqx = _equinox()
        module, state = self._with_values(variables)
        if training is not None:
            module = eqx.nn.inference_mode(module, value=not training)
        call = models.resolve_method(module, method, self.name)
        key = models.single_key(rngs, "default", "dropout")
        if key is not None and "key" in models.parameter_names(call):
            kwargs = {"key": key, **kwargs}
        if state is None:
            return call(*args, **kwargs), {}
        # The call invalidates the state that it is given.
        old_leaves = jax.tree.leaves(state)
        out, new_state = call(*args, **{"state": state, **kwargs})
        if not filters.in_filter(mutable, "state"):
            return out, {}
        new_leaves = jax.tree.leaves(new_state)
        return out, _nonempty(state=_changed_leaves(old_leaves, new_leaves))

    def _with_values(self, variables: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns the module and its state, with the variables as their arrays."""
        leaves = _array_leaves(*self._abstract)
        values: dict[models.Path, Any] = {}
        for path, entry in flat_dict.flatten_dict(variables).items():
            values[path] = meta.unbox(entry)
        models.check_variables(self.name, leaves, values)
        _, fill = display.split_arrays(self._abstract)
        # `leaves` has the order of the arrays in the pytree.
        return fill([values[path] for path in leaves])


def _changed_leaves(
    old_leaves: Sequence[Any], new_leaves: Sequence[Any]
) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for i, (old, new) in enumerate(zip(old_leaves, new_leaves, strict=True)):
        if new is not old:
            changed[str(i)] = new
    return changed


def _array_leaves(
    module: models.Layer, state: PyTree
) -> dict[models.Path, Any]:
    """Returns the arrays of a module and its state by collection and path."""
    leaves: dict[models.Path, Any] = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(module):
        if not display.is_array(leaf):
            continue
        collection = "constants"
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            collection = "params"
        names = [jax.tree_util.keystr((key,), simple=True) for key in key_path]
        leaves[collection, *names] = leaf
    for i, leaf in enumerate(jax.tree.leaves(state)):
        if display.is_array(leaf):
            leaves["state", str(i)] = leaf
    return leaves


def _nonempty(**collections: Mapping[str, Any]) -> models.Variables:
    return {name: entries for name, entries in collections.items() if entries}


class _HaikuFunctions(NamedTuple):
    """Pure functions of a layer, and the keyword arguments of a call of it."""

    init: Callable[..., Any]
    apply: Callable[..., Any]
    kwargs: dict[str, Any]


class HaikuModel(models.Model):
    """A Haiku module or transformed function.

    Args:
        module: a result of `haiku.transform` or `transform_with_state`, or a class of modules.
    """

    def __init__(self, module: models.Layer, *args: PyTree, **kwargs: PyTree):
        self.module, self.args, self.kwargs = module, args, kwargs

    @property
    def name(self) -> str:
        return getattr(self.module, "__name__", type(self.module).__name__)

    def _functions(
        self,
        method: str | None,
        kwargs: Mapping[str, Any],
        training: bool | None,
    ) -> _HaikuFunctions:
        hk = models.import_library("haiku", "dm-haiku")
        if isinstance(self.module, type):
            # A layer of Haiku is made inside of each transformed call.
            def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
                layer = self.module(*self.args, **self.kwargs)
                bound_method = models.resolve_method(layer, method, self.name)
                return bound_method(*args, **kwargs)

            transformed = hk.transform_with_state(run)
            called = getattr(self.module, method or "__call__", run)
            kwargs = models.add_mode(called, kwargs, training)
            return _HaikuFunctions(transformed.init, transformed.apply, kwargs)
        if method not in (None, "__call__"):
            raise errors.LayerMethodError(
                f"a transformed function of Haiku was asked for its method {method!r}; it has "
                "none, so transform the method itself."
            )
        transformed = self.module
        if isinstance(transformed, hk.Transformed):
            transformed = hk.with_empty_state(transformed)
        return _HaikuFunctions(
            transformed.init, transformed.apply, dict(kwargs)
        )

    def init(self, rngs, *args, training=None, method=None, **kwargs):
        functions = self._functions(method, kwargs, training)
        key = models.single_key(rngs, "params", "default")
        params, state = functions.init(key, *args, **functions.kwargs)
        return _nonempty(
            params=_nest_by_module_path(params),
            state=_nest_by_module_path(state),
        )

    def apply(
        self,
        variables,
        *args,
        rngs,
        mutable,
        training=None,
        method=None,
        **kwargs,
    ):
        functions = self._functions(method, kwargs, training)
        params = _join_module_path(variables.get("params", {}))
        state = _join_module_path(variables.get("state", {}))
        key = models.single_key(rngs, "default", "dropout")
        out, new_state = functions.apply(
            params, state, key, *args, **functions.kwargs
        )
        if not filters.in_filter(mutable, "state"):
            return out, {}
        return out, _nonempty(state=_nest_by_module_path(new_state))


def _nest_by_module_path(
    tree: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    values_by_path: dict[models.Path, Any] = {}
    for module, values in tree.items():
        for path, value in flat_dict.flatten_dict(values).items():
            values_by_path[*module.split("/"), *path] = value
    return flat_dict.unflatten_dict(values_by_path)


def _join_module_path(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    values_by_module: dict[str, dict[str, Any]] = {}
    for (*module_path, name), value in flat_dict.flatten_dict(tree).items():
        module = "/".join(module_path)
        values_by_module.setdefault(module, {})[name] = meta.unbox(value)
    return values_by_module
