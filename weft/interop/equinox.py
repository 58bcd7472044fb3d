"""Layers of Equinox in models of Weft.

An Equinox module is a pytree: its floating-point arrays are parameters, other arrays constants,
each at its path in the module. State of stateful layers is the collection `state`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from weft.core.filters import Filter, in_filter
from weft.core.meta import unbox
from weft.interop.models import (
    Model,
    Path,
    Variables,
    check_same_paths,
    flat,
    library,
    method_of,
    nested,
    one_key,
    parameters_of,
)

__all__ = ["EquinoxModel"]


class EquinoxModel(Model):
    """An Equinox module.

    Calls receive `key` if they accept one, and, for a stateful layer, the `state`, which they must
    return after the result.

    Args:
        module: the module, or a pair of it and its state, whose arrays are the initial values; or a
            class of modules.
        *args: for a class.
        **kwargs: for a class, except `key`.
    """

    def __init__(self, module: Any, *args: Any, **kwargs: Any):
        self.module, self.args, self.kwargs = module, args, kwargs
        self._shapes: Any = None

    @property
    def name(self) -> str:
        module = self.module[0] if isinstance(self.module, tuple) else self.module
        return (module if isinstance(module, type) else type(module)).__name__

    def _make(self, key: Any) -> tuple[Any, Any]:
        eqx = library("equinox", "equinox")
        if isinstance(self.module, tuple):
            return self.module
        if not isinstance(self.module, type):
            return self.module, None
        given = {"key": key} if "key" in parameters_of(self.module) else {}
        module, state = eqx.nn.make_with_state(self.module)(*self.args, **given, **self.kwargs)
        return module, state if jax.tree.leaves(state) else None

    def _structure(self) -> Any:
        """Returns the module and its state with shapes in place of arrays."""
        if self._shapes is None:
            eqx = library("equinox", "equinox")
            with jax.ensure_compile_time_eval():
                self._shapes = eqx.filter_eval_shape(self._make, jax.random.key(0))
        return self._shapes

    def init(self, rngs, *args, training=None, method=None, **kwargs):
        return nested(_arrays(*self._make(one_key(rngs, "params", "default"))))

    def apply(self, variables, *args, rngs, mutable, training=None, method=None, **kwargs):
        eqx = library("equinox", "equinox")
        module, state = self._filled(variables)
        if training is not None:
            module = eqx.nn.inference_mode(module, value=not training)
        call = method_of(module, method, self.name)
        given, key = parameters_of(call), one_key(rngs, "default", "dropout")
        if "key" in given and key is not None:
            kwargs = {"key": key, **kwargs}
        if state is None:
            return call(*args, **kwargs), {}
        before = jax.tree.leaves(state)  # the call ends the state that it is given
        out, after = call(*args, **{"state": state, **kwargs})
        return out, _changed(before, after, mutable)

    def _filled(self, variables: Mapping[str, Any]) -> tuple[Any, Any]:
        structure = self._structure()
        wanted, given = _arrays(*structure), flat(variables)
        check_same_paths(self.name, wanted, given := {p: unbox(x) for p, x in given.items()})
        leaves, tree = jax.tree.flatten(structure)
        values = iter([given[path] for path in wanted])
        filled = [next(values) if _is_array(leaf) else leaf for leaf in leaves]
        return tree.unflatten(filled)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _arrays(module: Any, state: Any) -> dict[Path, Any]:
    """Returns the arrays of a module and its state, by collection and path, in leaf order."""
    found: dict[Path, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(module):
        if _is_array(leaf):
            is_parameter = jnp.issubdtype(leaf.dtype, jnp.inexact)
            names = tuple(_name(part) for part in path)
            found[("params" if is_parameter else "constants", *names)] = leaf
    for i, leaf in enumerate(jax.tree.leaves(state)):
        if _is_array(leaf):
            found["state", str(i)] = leaf
    return found


def _name(part: Any) -> str:
    return jax.tree_util.keystr((part,), simple=True)


def _changed(before: list[Any], after: Any, mutable: Filter) -> Variables:
    if not in_filter(mutable, "state"):
        return {}
    pairs = zip(before, jax.tree.leaves(after), strict=True)
    changed = {str(i): new for i, (old, new) in enumerate(pairs) if new is not old}
    return {"state": changed} if changed else {}
