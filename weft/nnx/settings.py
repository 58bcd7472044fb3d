"""Settings that a program can change for itself or for a part of it.

A setting is a stack of values for each thread, of which the last one holds. It belongs to the cache
key of `jax.jit`, so a function that was compiled under another value is compiled again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax


class Setting:
    """Base class of settings; what is called sets the value, what is entered sets it for a while.

    An instance can be called on a function as well, which then runs under the value.

    Args:
        value: the value from now on, in this thread.

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
        """The value that holds."""
        stack = cls._context.value
        return stack[-1] if stack else cls._default

    @classmethod
    def get_default(cls) -> Any:
        """The value where nothing was set."""
        return cls._default

    @classmethod
    def get_stack(cls) -> list[Any]:
        """The values that were set in this thread, the one that holds last."""
        return list(cls._context.value)

    def _undo(self) -> None:
        """Takes back that it was set when it was made."""
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
