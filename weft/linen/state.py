"""What a bound module remembers while it runs: its submodules, and which names it has given."""

import contextlib
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weft.errors import MultipleMethodsCompactError, NameInUseError

if TYPE_CHECKING:
    from weft.core.scope import Scope
    from weft.linen.module import Module


class Setup(enum.Enum):
    """How far the method `setup` is."""

    DUE = enum.auto()
    RUNS = enum.auto()
    DONE = enum.auto()


class State:
    """The part of a module that is not its fields.

    Attributes:
        setup: how far `setup` is.
        in_compact: whether a compact method runs.
        children: the submodules by name.
        cursor: by class name, how many submodules have been named by themselves.
        given: the fields that hold modules, as they were given.
        inside: of a transformed class, the transformations inside of which the module is.
        adopted: by identity, the modules that were given to this module or to one above it, and
            their bound copies. The originals are kept, so that no identity is used twice.
    """

    def __init__(self) -> None:
        self.setup = Setup.DUE
        self.in_compact = False
        self.children: dict[str, Module] = {}
        self.cursor: dict[str, int] = {}
        self.given: dict[str, Any] = {}
        self.inside: frozenset[Any] = frozenset()
        self.adopted: dict[int, tuple[Module, Module]] = {}
        self._taken: list[tuple[str, str | None]] = []
        self._method = ""
        self._named_by: dict[str, tuple[str, Module]] = {}

    @property
    def setup_is_due(self) -> bool:
        return self.setup is Setup.DUE

    @property
    def in_setup(self) -> bool:
        return self.setup is Setup.RUNS

    def begin_compact(self, module: "Module", method: str) -> None:
        """A compact method gives the names again that it gave when it was called before."""
        scope: Any = module.scope
        for name, col in self._taken:
            scope.release(name, col)
            if col is None and (child := self.children.pop(name, None)):
                self._named_by[name] = self._method, child
        self._taken.clear()
        self.cursor.clear()
        self.in_compact = True
        self._method = method

    def take(self, scope: "Scope", name: str, module: "Module", child: "Module") -> None:
        """Notes that a submodule is given a name.

        Raises:
            NameInUseError: if it was given before.
            MultipleMethodsCompactError: if another compact method gave it to another module.
        """
        if scope.name_reserved(name):
            where = f"{type(module).__name__} {scope.path_text}"
            raise NameInUseError(f"submodule {type(child).__name__}", name, where)
        if self.in_compact and name in self._named_by:
            method, before = self._named_by[name]
            if method != self._method and before != child.clone(name=name):
                raise MultipleMethodsCompactError(
                    type(module).__name__, name, (method, self._method)
                )
        self.children[name] = child
        self.note(name, None)

    def note(self, name: str, col: str | None) -> None:
        """Notes a name that the next call of a compact method may give again."""
        if self.in_compact:
            self._taken.append((name, col))

    def next_name(self, prefix: str) -> str:
        """A name for a submodule that has none."""
        n = self.cursor.get(prefix, 0)
        self.cursor[prefix] = n + 1
        return f"{prefix}_{n}"

    @contextlib.contextmanager
    def below(self, module: "Module", name: str) -> Iterator[None]:
        """A context in which the module's submodules are below a scope of that name."""
        scope: Any = module.scope
        before = self.in_compact, self.cursor, self._taken, self.children
        self.in_compact, self.cursor, self._taken, self.children = True, {}, [], {}
        object.__setattr__(module, "scope", scope.push(name, reuse=True))
        try:
            yield
        finally:
            object.__setattr__(module, "scope", scope)
            self.in_compact, self.cursor, self._taken, self.children = before
