"""What a module of the bridge has while it runs, and which one runs in this thread."""

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
    """When an attribute comes, as the attributes of a module are gone through; low ones first."""

    HIGH = 0
    INIT_PARENT = 20
    DEFAULT = 50
    LOW = 100


class Scope(Pytree):
    """What a module is given by `init` or `apply`, and hands on to those in it.

    Args:
        rngs: the PRNG streams, shared by all modules of a call.
        mutable: the collections of which the caller wants the changes.

    Attributes:
        initializing: whether `init` runs.
        given: nested by attribute, the variables that the module was given and has not asked for.
    """

    def __init__(self, rngs: Rngs, mutable: Any = False, *, initializing: bool = False):
        self.rngs = rngs
        self.mutable = tuple(mutable) if isinstance(mutable, list | set) else mutable
        self.initializing = initializing
        self.given: dict[Any, Any] = {}

    def copy(self) -> "Scope":
        """A scope of the same streams, for a module that is given nothing yet."""
        return Scope(self.rngs, self.mutable, initializing=self.initializing)


@dataclasses.dataclass
class ModuleStackEntry:
    """A module whose method runs.

    Attributes:
        module: the module.
        in_compact: whether the method is a compact one.
        type_counter: by class, how many submodules the method has made that have no name of their
            own.
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
    """What runs: the module, and whether in a compact method; None outside of all."""
    return _stack.entries[-1] if _stack.entries else None


def current_module() -> "Module | None":
    """The module whose method runs, None outside of all."""
    context = current_context()
    return None if context is None else context.module


@contextlib.contextmanager
def running(module: "Module", in_compact: bool = False) -> Iterator[ModuleStackEntry]:
    """A context in which a method of a module runs."""
    _stack.entries.append(ModuleStackEntry(module, in_compact))
    try:
        yield _stack.entries[-1]
    finally:
        _stack.entries.pop()
