"""Interception of calls of a model's modules, of any library, with one observer.

Modules of several libraries may be nested, and each library names its own from its own root. Here a
path starts at the outermost root:

    trainer.model.decoder.head.layers.0    of NNX, in a module of Linen, in a layer of the hierarchy

Equinox and Flax NNX modules report no calls; the layer around them does.
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
"""Attribute with the path of an NNX module; static, so that transformations keep it."""


class ModuleCall(NamedTuple):
    """Call of a module's method, with the module's path and the name of its class."""

    path: str
    kind: str
    method: str

    def __str__(self) -> str:
        return f"{self.path}, a {self.kind} ({self.method})"


Observer = Callable[[ModuleCall, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Function that receives a call, the method and its arguments, and calls the method."""


@contextlib.contextmanager
def watched_calls(observer: Observer) -> Iterator[None]:
    """Passes calls of modules' methods to an observer, which calls the method, while open.

    The observer runs inside the transformations around the call.
    """
    watch = _Watch(observer)
    with contextlib.ExitStack() as stack:
        stack.enter_context(observed_calls(watch.of_hierarchy))
        stack.enter_context(intercept_methods(watch.of_linen))
        # A model with modules of these libraries has imported them.
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
    """Call in progress.

    `root` is the outermost module in a hierarchy, None in other libraries; `prefix` is the path of
    the outermost module of a library whose modules know their own paths.
    """

    path: str
    context: Any
    root: Module | None = None
    prefix: str | None = None


class _Watch:
    """Names calls and passes them to an observer."""

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
        """Returns the path of the outermost module of a library whose modules know their paths."""
        last = self._open[-1] if self._open else None
        if last is not None and last.prefix is not None and last.context is current_context():
            return last.prefix
        return self._around()

    def _around(self) -> str:
        """Returns the path of the innermost module being called."""
        context, last = current_context(), self._open[-1] if self._open else None
        if last is not None and (context is None or last.context is context):
            return last.path
        module = None if context is None else context.module
        return "" if module is None else self._whole_path(module)

    def _whole_path(self, module: Module) -> str:
        """Returns the path of a hierarchy layer, also inside a model of another library."""
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
