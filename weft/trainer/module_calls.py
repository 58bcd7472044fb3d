"""Calls of a model's modules, whatever library they are of, seen by one function.

Modules of several libraries may lie in each other, and each library names its own from its own
root. Here a name leads from the root of all:

    trainer.model.decoder.head.layers.0    of NNX, in a module of Linen, in a layer of the hierarchy

Modules of Equinox and of Flax NNX do not tell of their calls; the layer around them does.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from weft.hierarchy.module import Module, current_context, observed_calls
from weft.linen import intercept_methods
from weft.nnx.observing import class_of, modules_of, observe, visited_models
from weft.nnx.pytree import Pytree
from weft.nnx.rngs import Rngs, RngStream

_PLACE = "_place_in_model"
"""The attribute of an NNX module that says where it is; static, so transformations keep it."""


class ModuleCall(NamedTuple):
    """A call of a method of a module.

    Attributes:
        path: of the module.
        kind: its class.
        method: the method's name.
    """

    path: str
    kind: str
    method: str

    def __str__(self) -> str:
        return f"{self.path}, a {self.kind} ({self.method})"


Observer = Callable[[ModuleCall, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""A function of a call, the method and its arguments; it calls the method."""


@contextlib.contextmanager
def watched_calls(observer: Observer) -> Iterator[None]:
    """While open, calls of the methods of modules go through a function.

    Args:
        observer: called in place of the method, within the transformation in which the call is.
    """
    watch = _Watch(observer)
    with contextlib.ExitStack() as stack:
        stack.enter_context(observed_calls(watch.of_hierarchy))
        stack.enter_context(intercept_methods(watch.of_linen))
        # A model that has modules of these has imported them.
        if "flax.linen" in sys.modules:
            stack.enter_context(sys.modules["flax.linen"].intercept_methods(watch.of_linen))
        if "haiku" in sys.modules:
            stack.enter_context(sys.modules["haiku"].intercept_methods(watch.of_haiku))
        stack.enter_context(visited_models(watch.on_nnx_model))
        _WATCHES.stack.append(watch)
        try:
            yield
        finally:
            _WATCHES.stack.remove(watch)


class _Open(NamedTuple):
    """A call that is under way.

    Attributes:
        path: of the module.
        context: the invocation of a hierarchy layer in which it is.
        root: the outermost module of its hierarchy; None in other libraries.
        prefix: where the outermost module of its library is, for those that say their paths.
    """

    path: str
    context: Any
    root: Module | None = None
    prefix: str | None = None


class _Watch:
    """Names calls and gives them to an observer."""

    def __init__(self, observer: Observer):
        self._observer = observer
        self._open: list[_Open] = []

    def see(self, call: ModuleCall, method: Any, args: Any, kwargs: Any, **of_library: Any) -> Any:
        self._open.append(_Open(call.path, current_context(), **of_library))
        try:
            return self._observer(call, method, args, kwargs)
        finally:
            self._open.pop()

    def of_hierarchy(self, module: Module, name: str, method: Any, args: Any, kwargs: Any) -> Any:
        call = ModuleCall(self._whole_path(module), type(module).__name__, name)
        return self.see(call, method, args, kwargs, root=_root(module))

    def of_linen(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, prefix = context.module, self._prefix()
        call = ModuleCall(_joined(prefix, *module.path), type(module).__name__, context.method_name)
        return self.see(call, next_fun, args, kwargs, prefix=prefix)

    def of_haiku(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name == "__init__":
            return next_fun(*args, **kwargs)
        module, prefix = context.module, self._prefix()
        parts = [part for part in module.module_name.split("/") if part != "~"]
        call = ModuleCall(_joined(prefix, *parts), type(module).__name__, context.method_name)
        return self.see(call, next_fun, args, kwargs, prefix=prefix)

    def on_nnx_model(self, model: Pytree) -> None:
        prefix = self._around()
        for path, x in list(modules_of(model)):
            if not isinstance(x, Rngs | RngStream):
                vars(x)[_PLACE] = _joined(prefix, *path)
                observe(x, _of_nnx)

    def _prefix(self) -> str:
        """Where the outermost module of a library is that says the paths of its modules."""
        last = self._open[-1] if self._open else None
        if last is not None and last.prefix is not None and last.context is current_context():
            return last.prefix
        return self._around()

    def _around(self) -> str:
        """The path of the module whose call is the innermost."""
        context, last = current_context(), self._open[-1] if self._open else None
        if last is not None and (context is None or last.context is context):
            return last.path
        module = None if context is None else context.module
        return "" if module is None else self._whole_path(module)

    def _whole_path(self, module: Module) -> str:
        """The path of a hierarchy layer, also of one that is in a model of another library."""
        root = _root(module)
        outer = next((call for call in reversed(self._open) if call.root is not root), None)
        if outer is None:
            return module.path()
        return _joined(outer.path, module.path().partition(".")[2])


class _Watches(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Watch] = []


_WATCHES = _Watches()


def _of_nnx(x: Any, name: str, method: Any, args: Any, kwargs: Any) -> Any:
    path = vars(x).get(_PLACE)
    if not _WATCHES.stack or path is None:
        return method(*args, **kwargs)
    call = ModuleCall(path, class_of(x).__name__, name)
    return _WATCHES.stack[-1].see(call, method, args, kwargs)


def _root(module: Module) -> Module:
    while module.parent is not None:
        module = module.parent
    return module


def _joined(*parts: Any) -> str:
    return ".".join(str(part) for part in parts if part != "")
