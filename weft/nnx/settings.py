"""Thread-local settings, for a program or a block.

A setting is a stack of values per thread; the last one is current. It is part of the cache key of
`jax.jit`, so functions are recompiled when it changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax


class Setting:
    """Base class of settings: construction sets the value in this thread.

    As a context manager or decorator, an instance limits it to the block or call.

    Example:
        >>> class verbosity(Setting, default=0):
        ...     pass
        >>> with verbosity(2):
        ...     verbosity.current()
        2
        >>> verbosity.current()
        0
    """

    _context: ClassVar[Any]
    _default: ClassVar[Any]

    def __init_subclass__(cls, *, default: Any, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._context, cls._default = jax.make_user_context(()), default

    def __init__(self, value: Any, /):
        self.value = value
        self._before: tuple[Any, ...] | None = self._context.value
        self._entered: list[Any] = []
        self._context((*self._context.value[:-1], value)).__enter__()

    @classmethod
    def current(cls) -> Any:
        """Returns the current value."""
        stack = cls._context.value
        return stack[-1] if stack else cls._default

    @classmethod
    def get_default(cls) -> Any:
        """Returns the default value."""
        return cls._default

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

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def __call__(self, f: Callable[..., Any]) -> Callable[..., Any]:
        self._undo()

        @functools.wraps(f)
        def under_it(*args: Any, **kwargs: Any) -> Any:
            with self._on_top():
                return f(*args, **kwargs)

        return under_it
