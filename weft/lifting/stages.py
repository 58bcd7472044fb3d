"""Jitted functions ahead of time: the stages of JAX, called with what the function takes.

JAX knows the pure function that stands for the user's one. A stage here has the attributes of the
stage of JAX, and when it is called, carriers cross as in any call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

Run = Callable[[jax.stages.Compiled, tuple[Any, ...], dict[str, Any]], Any]


class Stage:
    """A stage of JAX.

    Args:
        stage: of `jax.stages`; its attributes are those of this one.
        run: calls what was compiled with arguments of the user's function.
    """

    def __init__(self, stage: Any, run: Run):
        self._stage, self._run = stage, run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stage, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._stage!r})"


class Traced(Stage):
    """A function that was traced; has the attributes of `jax.stages.Traced`."""

    def lower(self, **options: Any) -> "Lowered":
        """As for JAX.

        Args:
            **options: likewise.
        """
        return Lowered(self._stage.lower(**options), self._run)


class Lowered(Stage):
    """A function that was lowered; has the attributes of `jax.stages.Lowered`."""

    def compile(self, *args: Any, **options: Any) -> "Compiled":
        """As for JAX.

        Args:
            *args: likewise.
            **options: likewise.
        """
        return Compiled(self._stage.compile(*args, **options), self._run)


class Compiled(Stage):
    """A compiled function; has the attributes of `jax.stages.Compiled`."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls it.

        Args:
            *args: like those for which it was compiled.
            **kwargs: likewise.
        """
        return self._run(self._stage, args, kwargs)
