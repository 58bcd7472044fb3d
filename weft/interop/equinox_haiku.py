"""Layers of Equinox and Haiku in models of Weft.

An Equinox module is a pytree: its floating-point arrays are parameters, other arrays constants,
each at its path in the module. Haiku's module names, such as `mlp/~/linear_0`, are split: each part
is a level of the collections. State of stateful layers is the collection `state` in both.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from weft import errors
from weft.core import display, filters, flat_dict, meta
from weft.interop import models


class EquinoxModel(models.Model):
    """An Equinox module.

    Calls receive `key` if accepted, and for a stateful layer `state`, which they return last.

    Args:
        module: the module, a pair of it and its state, with the initial values, or a class.
        **kwargs: for a class, except `key`.
    """

    def __init__(self, module: Any, *args: object, **kwargs: object):
        self.module, self.args, self.kwargs = module, args, kwargs

    @property
    def name(self) -> str:
        module = self.module[0] if isinstance(self.module, tuple) else self.module
        return (module if isinstance(module, type) else type(module)).__name__

    def _make(self, key: jax.Array) -> tuple[Any, Any]:
        eqx = models.import_library("equinox", "equinox")
        if isinstance(self.module, tuple):
            return self.module
        if not isinstance(self.module, type):
            return self.module, None
        given = {"key": key} if "key" in models.parameter_names(self.module) else {}
        module, state = eqx.nn.make_with_state(self.module)(*self.args, **given, **self.kwargs)
        return module, state if jax.tree.leaves(state) else None

    @functools.cached_property
    def _structure(self) -> Any:
        eqx = models.import_library("equinox", "equinox")
        with jax.ensure_compile_time_eval():
            return eqx.filter_eval_shape(self._make, jax.random.key(0))

    def init(self, rngs, *args, training=None, method=None, **kwargs):
        key = models.single_key(rngs, "params", "default")
        return flat_dict.unflatten_dict(_array_leaves(*self._make(key)))

    def apply(self, variables, *args, rngs, mutable, training=None, method=None, **kwargs):
        eqx = models.import_library("equinox", "equinox")
        module, state = self._fill_structure(variables)
        if training is not None:
            module = eqx.nn.inference_mode(module, value=not training)
        call = models.resolve_method(module, method, self.name)
        given, key = models.parameter_names(call), models.single_key(rngs, "default", "dropout")
        if "key" in given and key is not None:
            kwargs = {"key": key, **kwargs}
        if state is None:
            return call(*args, **kwargs), {}
        before = jax.tree.leaves(state)  # the call ends the state that it is given
        out, after = call(*args, **{"state": state, **kwargs})
        return out, _changed_state(before, after, mutable)

    def _fill_structure(self, variables: Mapping[str, Any]) -> tuple[Any, Any]:
        expected = _array_leaves(*self._structure)
        values = {path: meta.unbox(x) for path, x in flat_dict.flatten_dict(variables).items()}
        models.check_variables(self.name, expected, values)
        _, fill = display.split_arrays(self._structure)
        return fill([values[path] for path in expected])


def _array_leaves(module: object, state: object) -> dict[models.Path, Any]:
    found: dict[models.Path, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(module):
        if display.is_array(leaf):
            is_parameter = jnp.issubdtype(leaf.dtype, jnp.inexact)
            names = [jax.tree_util.keystr((part,), simple=True) for part in path]
            found[("params" if is_parameter else "constants", *names)] = leaf
    for i, leaf in enumerate(jax.tree.leaves(state)):
        if display.is_array(leaf):
            found["state", str(i)] = leaf
    return found


def _changed_state(before: list[Any], after: object, mutable: filters.Filter) -> models.Variables:
    if not filters.in_filter(mutable, "state"):
        return {}
    pairs = zip(before, jax.tree.leaves(after), strict=True)
    changed = {str(i): new for i, (old, new) in enumerate(pairs) if new is not old}
    return {"state": changed} if changed else {}


class HaikuModel(models.Model):
    """A Haiku module or transformed function.

    Args:
        module: a result of `haiku.transform` or `transform_with_state`, or a class of modules.
    """

    def __init__(self, module: Any, *args: object, **kwargs: object):
        self.module, self.args, self.kwargs = module, args, kwargs

    @property
    def name(self) -> str:
        return getattr(self.module, "__name__", type(self.module).__name__)

    def _functions(
        self, method: str | None, kwargs: Mapping[str, Any], training: bool | None
    ) -> tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]:
        hk = models.import_library("haiku", "dm-haiku")
        if isinstance(self.module, type):
            called = getattr(self.module, method or "__call__", None)
            if called is None:
                models.resolve_method(self.module, method, self.name)  # says so

            def run(*args: Any, **kwargs: Any) -> Any:
                layer = self.module(*self.args, **self.kwargs)
                return models.resolve_method(layer, method, self.name)(*args, **kwargs)

            pair = hk.transform_with_state(run)
            return pair.init, pair.apply, models.add_mode(called, kwargs, training)  # pyright: ignore[reportArgumentType]
        if method not in (None, "__call__"):
            raise errors.LayerMethodError(
                f"a transformed function of Haiku was asked for its method {method!r}; it has "
                "none, so transform the method itself."
            )
        if isinstance(self.module, hk.Transformed):
            pair = hk.with_empty_state(self.module)
            return pair.init, pair.apply, dict(kwargs)
        return self.module.init, self.module.apply, dict(kwargs)

    def init(self, rngs, *args, training=None, method=None, **kwargs):
        init, _, kwargs = self._functions(method, kwargs, training)
        params, state = init(models.single_key(rngs, "params", "default"), *args, **kwargs)
        found = {"params": _nest_by_module_path(params), "state": _nest_by_module_path(state)}
        return {col: entries for col, entries in found.items() if entries}

    def apply(self, variables, *args, rngs, mutable, training=None, method=None, **kwargs):
        _, apply, kwargs = self._functions(method, kwargs, training)
        params, state = (_join_module_path(variables.get(col, {})) for col in ("params", "state"))
        key = models.single_key(rngs, "default", "dropout")
        out, after = apply(params, state, key, *args, **kwargs)
        changed = _nest_by_module_path(after) if filters.in_filter(mutable, "state") else {}
        return out, {"state": changed} if changed else {}


def _nest_by_module_path(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[models.Path, Any] = {}
    for module, values in tree.items():
        for path, value in flat_dict.flatten_dict(values).items():
            found[(*module.split("/"), *path)] = value
    return flat_dict.unflatten_dict(found)


def _join_module_path(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for (*module, name), value in flat_dict.flatten_dict(tree).items():
        found.setdefault("/".join(module), {})[name] = meta.unbox(value)
    return found
