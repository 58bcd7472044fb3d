"""Ahead-of-time compilation of jitted functions: JAX's stages, called with the user's arguments.

A stage wraps JAX's stage of the pure function, with its attributes; carriers cross in calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

Run = Callable[[jax.stages.Compiled, tuple[Any, ...], dict[str, Any]], Any]


class Stage:
    """Wrapper of a stage of JAX, with its attributes; `run` calls the compiled function."""

    def __init__(self, stage: Any, run: Run):
        self._stage, self._run = stage, run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stage, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._stage!r})"


class Traced(Stage):
    """Traced function, with the attributes of `jax.stages.Traced`."""

    def lower(self, **options: Any) -> "Lowered":
        return Lowered(self._stage.lower(**options), self._run)


class Lowered(Stage):
    """Lowered function, with the attributes of `jax.stages.Lowered`."""

    def compile(self, *args: Any, **options: Any) -> "Compiled":
        return Compiled(self._stage.compile(*args, **options), self._run)


class Compiled(Stage):
    """Compiled function, with the attributes of `jax.stages.Compiled`."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._stage, args, kwargs)
