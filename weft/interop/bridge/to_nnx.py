"""Linen modules as NNX modules: `ToNNX`, whose attributes are the Linen module's variables."""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Self, TypeVar

from weft.core.filters import Filter
from weft.errors import InvalidRngError, LayerVariablesError, TransformArgumentError
from weft.interop.bridge.variables import collection_of, to_linen_var, to_nnx_var
from weft.interop.linen import LinenModel
from weft.interop.models import Model, Path, flat, nested, shown
from weft.nnx.kinds import variable_type_from_name
from weft.nnx.module import Module
from weft.nnx.rngs import Rngs
from weft.nnx.variables import Variable

__all__ = ["ToNNX", "lazy_init"]

F = TypeVar("F")
_OWN = "to_nnx__"


class _Pass(threading.local):
    """The modules that the running `lazy_init` has initialized; None outside of any."""

    def __init__(self) -> None:
        self.done: list[ToNNX] | None = None


_pass = _Pass()


class ToNNX(Module):
    """A Linen module as a module of NNX.

    Its variables are attributes, made by `lazy_init`; those of a submodule are in a dict with the
    submodule's name.

    Args:
        module: the Linen module.
        rngs: a key, or `Rngs` to fork. Each call draws one key of each stream; `default` replaces
            a missing `params`.

    Attributes:
        to_nnx__module: the Linen module.
        to_nnx__rngs: the streams.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import linen as nn, nnx
        >>> layer = ToNNX(nn.Dense(2), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 3)))
        >>> layer.kernel.shape
        (3, 2)
    """

    def __init__(self, module: Any, rngs: Any = None):
        self.to_nnx__module = module
        if isinstance(rngs, Rngs):
            rngs = rngs.fork()
        self.to_nnx__rngs = rngs if rngs is None or isinstance(rngs, Rngs) else Rngs(params=rngs)

    @property
    def module(self) -> Any:
        """Linen module."""
        return self.to_nnx__module

    @property
    def rngs(self) -> Rngs | None:
        """PRNG streams."""
        return self.to_nnx__rngs

    @property
    def _model(self) -> Model:
        module = self.to_nnx__module
        return module if isinstance(module, Model) else LinenModel(module)

    def lazy_init(self, *args: Any, rngs: Any = None, **kwargs: Any) -> Self:
        """Makes the variables and returns the module itself; arguments are those of a call."""
        self._take(self._model.init(self._keys(rngs), *args, **kwargs))
        return self

    def __call__(
        self,
        *args: Any,
        rngs: Any = None,
        method: Any = None,
        mutable: Filter | None = None,
        **kwargs: Any,
    ) -> Any:
        """Calls the Linen module on its variables.

        Args:
            *args: of the call.
            rngs: streams in place of the module's own: `Rngs`, a key, or keys by stream.
            method: a method, its name, or a function of the Linen module.
            mutable: the collections that the call may change, in place.
            **kwargs: of the call.
        """
        keys, model = self._keys(rngs), self._model
        how: dict[str, Any] = {"rngs": keys, "method": method, **kwargs}
        if _pass.done is not None:
            if not any(m is self for m in _pass.done):
                _pass.done.append(self)
                self._take(model.init(keys, *args, method=method, **kwargs))
            return model.apply(self._variables(), *args, mutable=True, **how)[0]
        out, changed = model.apply(self._variables(), *args, mutable=mutable or False, **how)
        if changed:
            self._take(changed)
        return out

    def _keys(self, rngs: Any) -> dict[str, Any]:
        if isinstance(rngs, Mapping):
            return dict(rngs)
        if rngs is None:
            rngs = self.to_nnx__rngs
        elif not isinstance(rngs, Rngs):
            return {"params": rngs}
        keys = {}
        for name, stream in [] if rngs is None else rngs.items():
            # Streams that this module's model was not given are none of the Linen module either.
            with contextlib.suppress(InvalidRngError):
                keys[name] = stream()
        return keys

    # The attributes.

    def _held(self) -> dict[Path, Any]:
        """Returns the variables that are attributes, by path."""
        names = [n for n in vars(self) if not n.startswith(("_", _OWN)) and n not in _SET_BY_MODE]
        return flat({name: vars(self)[name] for name in names})

    def _variables(self) -> dict[str, Any]:
        found: dict[Path, Any] = {}
        for path, x in self._held().items():
            if not isinstance(x, Variable):
                raise LayerVariablesError(
                    f"{type(self).__name__} of {self._model.name} has the attribute "
                    f"{shown(path)!r} of type {type(x).__name__}, which is in no collection; make "
                    "it a variable, such as nnx.Param."
                )
            found[collection_of(type(x)), *path] = to_linen_var(x)
        return nested(found)

    def _lays_out(self, x: Any) -> bool:
        """Returns whether to apply the layout of a new value's box; an error without a mesh."""
        return True

    def _take(self, variables: Mapping[str, Any]) -> None:
        """Sets the values of existing variables, and attributes for new ones."""
        there: dict[Path, Any] = self._held()
        new: dict[Path, Any] = {}
        for (col, *rest), x in flat(variables).items():
            path, kind = tuple(rest), variable_type_from_name(col, allow_register=True)
            before: Any = new.get(path, there.get(path))
            if path in new or (before is not None and type(before) is not kind):
                raise LayerVariablesError(
                    f"{self._model.name} has a variable {shown(path)!r} in the collections "
                    f"{collection_of(type(before))!r} and {col!r}, and a module of NNX has one "
                    "attribute of a name; rename one of them."
                )
            if before is None:
                new[path] = to_nnx_var(col, x, lay_out=self._lays_out(x))
            else:
                before.set_raw_value(to_nnx_var(col, x, lay_out=False).get_raw_value())
        for path, variable in new.items():
            self._hold(path, variable)

    def _hold(self, path: Path, variable: Any) -> None:
        """Sets an attribute, or an entry of the dicts of submodules."""
        *above, name = path
        at: Any = self
        for part in above:
            at = _below(at, part)
        _set(at, name, variable)


_SET_BY_MODE = ("deterministic",)


def _below(at: Any, name: Any) -> Any:
    """Returns the dict of a submodule, which is made if missing."""
    entries = vars(at) if isinstance(at, ToNNX) else at
    if name not in entries:
        _set(at, name, {})
    return (vars(at) if isinstance(at, ToNNX) else at)[name]


def _set(at: Any, name: Any, value: Any) -> None:
    if isinstance(at, ToNNX):
        setattr(at, name, value)
    else:
        at[name] = value


def lazy_init(fn: F, *args: Any, **kwargs: Any) -> F:
    """Makes the variables of other libraries' layers in a module by calling it; returns `fn`.

    Args:
        fn: an NNX module, or a method of one.
        *args: of the call.
        **kwargs: of the call.

    Raises:
        TransformArgumentError: if `fn` is neither.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import linen as nn, nnx
        >>> model = nnx.Sequential(ToNNX(nn.Dense(4), nnx.Rngs(0)), ToNNX(nn.Dense(2), nnx.Rngs(1)))
        >>> lazy_init(model, jnp.ones((1, 3))).layers[1].kernel.shape
        (4, 2)
    """
    of = fn if isinstance(fn, Module) else getattr(fn, "__self__", None)
    if not isinstance(of, Module) or not callable(fn):
        raise TransformArgumentError(
            f"lazy_init was given {fn!r}; give a module of NNX that can be called, or a method of "
            "one, such as model.encode."
        )
    if isinstance(fn, ToNNX):
        fn.lazy_init(*args, **kwargs)
        return fn  # pyright: ignore[reportReturnType]
    with initializing():
        fn(*args, **kwargs)
    return fn


@contextlib.contextmanager
def initializing() -> Iterator[None]:
    """Lets the first call of each `ToNNX` make its variables."""
    before, _pass.done = _pass.done, []
    try:
        yield
    finally:
        _pass.done = before
