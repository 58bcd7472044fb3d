"""Thread-local settings, for a program or a block.

A setting is a stack of values per thread; the last one is current. It is part of the cache key of
`jax.jit`, so functions are recompiled when it changes. A setting of the process may be its
default, which is not part of the key: change that at the start of a program.

Settings choose between two semantics of objects. As *graphs* (the default), objects may be shared
and cyclic, and all changes in a function are visible outside: values, references, static
attributes. As *trees*, nothing is shared, and only the values of variables come back.
`graph_updates=False` allows shared input references, and brings back values only. The mode is fixed
when a function is transformed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic, Self, TypedDict, TypeVar

import jax

from weft.core.settings import settings as process_settings

T = TypeVar("T")
Value = TypeVar("Value")


class Setting(Generic[Value]):
    """Base class of settings: construction sets the value in this thread.

    As a context manager or decorator, an instance limits it to the block or call.

    >>> class verbosity(Setting, default=0):
    ...     pass
    >>> with verbosity(2):
    ...     verbosity.current()
    2
    >>> verbosity.current()
    0
    """

    _context: ClassVar[Any]
    _defaults: ClassVar[Mapping[str, Any]]
    _process_setting: ClassVar[str]

    def __init_subclass__(
        cls, *, default: Any = None, process_setting: str = ""
    ) -> None:
        super().__init_subclass__()
        cls._context = jax.make_user_context(())
        cls._process_setting = process_setting
        if process_setting:
            cls._defaults = vars(process_settings)
        else:
            cls._defaults = {process_setting: default}

    def __init__(self, value: Value, /):
        self.value = value
        self._before: tuple[Any, ...] | None = self._context.value
        self._entered: list[AbstractContextManager[None]] = []
        stack = (*self._context.value[:-1], value)
        if stack == (self.get_default(),):
            # As in a thread where nothing was set, so that both find the same compiled functions.
            stack = ()
        self._context(stack).__enter__()

    @classmethod
    def current(cls) -> Value:
        """Returns the current value."""
        stack = cls._context.value
        if stack:
            return stack[-1]
        return cls._defaults[cls._process_setting]

    @classmethod
    def get_default(cls) -> Value:
        """Returns the default value."""
        return cls._defaults[cls._process_setting]

    @classmethod
    def get_stack(cls) -> list[Value]:
        """Returns the values set in this thread, current one last."""
        return list(cls._context.value)

    def _undo(self) -> None:
        """Takes back what construction set, for a use as context manager or decorator."""
        if self._before is not None:
            self._context(self._before).__enter__()
            self._before = None

    def _on_top(self) -> AbstractContextManager[None]:
        return self._context((*self._context.value, self.value))

    def __enter__(self) -> Self:
        self._undo()
        context = self._on_top()
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def __call__(self, f: Callable[..., T]) -> Callable[..., T]:
        self._undo()

        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> T:
            with self._on_top():
                return f(*args, **kwargs)

        return call


class _BooleanSetting(Setting[bool]):
    def __init__(self, value: bool, /):
        super().__init__(bool(value))

    @classmethod
    def current_value(cls) -> bool:
        """Returns the value in this thread."""
        return cls.current()


class set_graph_mode(_BooleanSetting, process_setting="graph_mode"):
    """Sets whether objects cross transformations as graphs by default.

    Args:
        value: True for graphs, False for trees; the default of `graph=`. It applies to this thread
            from now on, or within a context or decorated function.

    >>> with set_graph_mode(False):
    ...     set_graph_mode.current_value()
    False
    """


class set_graph_updates(_BooleanSetting, process_setting="graph_updates"):
    """Sets whether transformations bring back changes of references and static attributes.

    The setting is the default of `graph_updates=`; for its scope see `set_graph_mode`.
    """


class GraphOptions(TypedDict, total=False):
    """Semantics of objects in one transformed function; None for the setting."""

    graph: bool | None
    graph_updates: bool | None


def resolve_graph_options(
    graph: bool | None = None, graph_updates: bool | None = None
) -> tuple[bool, bool]:
    """Returns whether objects may be shared, and whether changes of structure come back."""
    if graph is None:
        graph = set_graph_mode.current_value()
    if graph_updates is None:
        graph_updates = set_graph_updates.current_value()
    return bool(graph), bool(graph and graph_updates)
