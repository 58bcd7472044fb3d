"""Scopes of bridge modules, and the stack of running modules of each thread."""

import contextlib
import dataclasses
import enum
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weft.nnx.pytree import Pytree
from weft.nnx.rngs import Rngs

if TYPE_CHECKING:
    from weft.interop.bridge.modules import Module

__all__ = ["AttrPriority", "ModuleStackEntry", "Scope", "current_context", "current_module"]


class AttrPriority(enum.IntEnum):
    """Priorities in the order of a module's attributes; low ones first."""

    HIGH = 0
    INIT_PARENT = 20
    DEFAULT = 50
    LOW = 100


class Scope(Pytree):
    """Context that `init` or `apply` passes to a module and its submodules.

    Args:
        rngs: the PRNG streams, shared by all modules of a call.
        mutable: the collections whose changes the caller wants.

    Attributes:
        initializing: whether `init` runs.
        given: variables passed to the module and not yet used, nested by attribute.
    """

    def __init__(self, rngs: Rngs, mutable: Any = False, *, initializing: bool = False):
        self.rngs = rngs
        self.mutable = tuple(mutable) if isinstance(mutable, list | set) else mutable
        self.initializing = initializing
        self.given: dict[Any, Any] = {}

    def copy(self) -> "Scope":
        """Returns a scope with the same streams and no given variables."""
        return Scope(self.rngs, self.mutable, initializing=self.initializing)


@dataclasses.dataclass
class ModuleStackEntry:
    """A module with a running method.

    Attributes:
        in_compact: whether the method is compact.
        type_counter: number of unnamed submodules that the method has made, by class.
    """

    module: "Module"
    in_compact: bool
    type_counter: defaultdict[type, int] = dataclasses.field(
        default_factory=lambda: defaultdict(int)
    )


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entries: list[ModuleStackEntry] = []


_stack = _Stack()


def current_context() -> ModuleStackEntry | None:
    """Returns the innermost running module's entry, or None."""
    return _stack.entries[-1] if _stack.entries else None


def current_module() -> "Module | None":
    """Returns the innermost running module, or None."""
    context = current_context()
    return None if context is None else context.module


@contextlib.contextmanager
def running(module: "Module", in_compact: bool = False) -> Iterator[ModuleStackEntry]:
    """Enters a method of a module."""
    _stack.entries.append(ModuleStackEntry(module, in_compact))
    try:
        yield _stack.entries[-1]
    finally:
        _stack.entries.pop()
