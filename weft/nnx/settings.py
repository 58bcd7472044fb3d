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
from typing import Any, ClassVar, Self, TypedDict

import jax

from weft.core.settings import settings as process_settings


class Setting:
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

    def __init_subclass__(cls, *, default: object = None, process_setting: str = "") -> None:
        super().__init_subclass__()
        cls._context = jax.make_user_context(())
        cls._process_setting = process_setting
        cls._defaults = vars(process_settings) if process_setting else {"": default}

    def __init__(self, value: object, /):
        self.value = value
        self._before: tuple[Any, ...] | None = self._context.value
        self._entered: list[Any] = []
        stack = (*self._context.value[:-1], value)
        # As in a thread where nothing was set, so that both find the same compiled functions.
        self._context(() if stack == (self.get_default(),) else stack).__enter__()

    @classmethod
    def current(cls) -> Any:
        """Returns the current value."""
        stack = cls._context.value
        return stack[-1] if stack else cls._defaults[cls._process_setting]

    @classmethod
    def get_default(cls) -> Any:
        """Returns the default value."""
        return cls._defaults[cls._process_setting]

    @classmethod
    def get_stack(cls) -> list[Any]:
        """Returns the values set in this thread, current one last."""
        return list(cls._context.value)

    def _undo(self) -> None:
        if self._before is not None:
            self._context(self._before).__enter__()
            self._before = None

    def _on_top(self) -> Any:
        return self._context((*self._context.value, self.value))

    def __enter__(self) -> Self:
        self._undo()
        self._entered.append(self._on_top())
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(*error)

    def __call__(self, f: Callable[..., Any]) -> Callable[..., Any]:
        self._undo()

        @functools.wraps(f)
        def under_it(*args: object, **kwargs: object) -> Any:
            with self._on_top():
                return f(*args, **kwargs)

        return under_it


class _BooleanSetting(Setting):
    def __init__(self, value: object, /):
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
    references = set_graph_mode.current() if graph is None else bool(graph)
    updates = set_graph_updates.current() if graph_updates is None else bool(graph_updates)
    return references, references and updates
