"""Layers of Haiku in models of Weft.

Haiku's module names, such as `mlp/~/linear_0`, are split: each part is a level of the collections
`params` and `state`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from weft.core.filters import in_filter
from weft.core.meta import unbox
from weft.errors import LayerMethodError
from weft.interop.models import (
    Model,
    Path,
    flat,
    library,
    method_of,
    nested,
    one_key,
    with_mode,
)

__all__ = ["HaikuModel"]


class HaikuModel(Model):
    """A Haiku module or transformed function.

    Args:
        module: a result of `haiku.transform` or `haiku.transform_with_state`, or a class of
            modules.
        *args: for a class.
        **kwargs: for a class.
    """

    def __init__(self, module: Any, *args: Any, **kwargs: Any):
        self.module, self.args, self.kwargs = module, args, kwargs

    @property
    def name(self) -> str:
        return getattr(self.module, "__name__", type(self.module).__name__)

    def _functions(
        self, method: Any, kwargs: Mapping[str, Any], training: bool | None
    ) -> tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]:
        """Returns `init` and `apply` with state, and the arguments for both."""
        hk = library("haiku", "dm-haiku")
        if isinstance(self.module, type):
            called = getattr(self.module, method or "__call__", None)
            if called is None:
                method_of(self.module, method, self.name)  # says so

            def run(*args: Any, **kwargs: Any) -> Any:
                layer = self.module(*self.args, **self.kwargs)
                return method_of(layer, method, self.name)(*args, **kwargs)

            pair = hk.transform_with_state(run)
            return pair.init, pair.apply, with_mode(called, kwargs, training)  # pyright: ignore[reportArgumentType]
        if method not in (None, "__call__"):
            raise LayerMethodError(
                f"a transformed function of Haiku was asked for its method {method!r}; it has "
                "none, so transform the method itself."
            )
        if isinstance(self.module, hk.Transformed):
            pair = hk.with_empty_state(self.module)
            return pair.init, pair.apply, dict(kwargs)
        return self.module.init, self.module.apply, dict(kwargs)

    def init(self, rngs, *args, training=None, method=None, **kwargs):
        init, _, kwargs = self._functions(method, kwargs, training)
        params, state = init(one_key(rngs, "params", "default"), *args, **kwargs)
        found = {"params": _by_parts(params), "state": _by_parts(state)}
        return {col: entries for col, entries in found.items() if entries}

    def apply(self, variables, *args, rngs, mutable, training=None, method=None, **kwargs):
        _, apply, kwargs = self._functions(method, kwargs, training)
        params, state = (_by_module(variables.get(col, {})) for col in ("params", "state"))
        key = one_key(rngs, "default", "dropout")
        out, after = apply(params, state, key, *args, **kwargs)
        changed = _by_parts(after) if in_filter(mutable, "state") else {}
        return out, {"state": changed} if changed else {}


def _by_parts(tree: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Nests values by the parts of their module's name."""
    found: dict[Path, Any] = {}
    for module, values in tree.items():
        for path, value in flat(values).items():
            found[(*module.split("/"), *path)] = value
    return nested(found)


def _by_module(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Inverts `_by_parts`, without boxes."""
    found: dict[str, dict[str, Any]] = {}
    for (*module, name), value in flat(tree).items():
        found.setdefault("/".join(module), {})[name] = unbox(value)
    return found
