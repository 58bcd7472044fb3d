"""What a bound module remembers while it runs: its submodules, and which names it has given."""

import contextlib
import enum
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from weft.errors import MultipleMethodsCompactError, NameInUseError

if TYPE_CHECKING:
    from weft.core.scope import Names, Scope
    from weft.linen.module import Module


class Setup(enum.Enum):
    """How far the method `setup` is."""

    DUE = enum.auto()
    RUNS = enum.auto()
    DONE = enum.auto()


_NOTHING: Any = MappingProxyType({})


class State:
    """The part of a module that is not its fields.

    Modules are many, and most of them have no submodules and no names to remember. So an instance
    holds what differs from the values of the class, and its containers come with their first entry:
    what is not there is not followed by the garbage collector, which runs more than once a trace.

    Attributes:
        setup: how far `setup` is.
        in_compact: whether a compact method runs.
        children: the submodules by name.
        given: the fields that hold modules, as they were given.
        inside: of a transformed class, the transformations inside of which the module is.
        own_names: what `setup` and the fields have named. It goes through a transformation with the
            module, so that a function inside cannot give a name again.
        adopted: by identity, the modules that were given to this module or to one above it, and
            their bound copies. The originals are kept, so that no identity is used twice.
    """

    setup = Setup.DUE
    in_compact = False
    children: "dict[str, Module]" = _NOTHING
    given: dict[str, Any] = _NOTHING
    inside: frozenset[Any] = frozenset()
    own_names: "Names" = _NOTHING
    adopted: "dict[int, tuple[Module, Module]]"
    _taken: dict[str | None, list[str]] = _NOTHING
    _method = ""
    _named_by: "dict[str, tuple[str, Module]]" = _NOTHING
    _name_scopes: frozenset[str] = frozenset()
    _places: "list[tuple[Scope | None, dict[str, int]]]" = _NOTHING

    @property
    def setup_is_due(self) -> bool:
        return self.setup is Setup.DUE

    @property
    def in_setup(self) -> bool:
        return self.setup is Setup.RUNS

    @property
    def place(self) -> "Scope | None":
        """Where submodules are made, if that is below a scope with the name of a method."""
        return self._places[-1][0] if self._places else None

    @property
    def cursor(self) -> dict[str, int]:
        """By class name, how many submodules of this place have been named by themselves."""
        return self._places[-1][1] if self._places else _NOTHING

    @property
    def names_submodules(self) -> bool:
        """Whether a method runs in which submodules can be made without an attribute."""
        return self.in_compact or self.place is not None

    def begin_compact(self, module: "Module", method: str) -> None:
        """A compact method gives the names again that it gave when it was called before."""
        scope: Any = module.scope
        for col, names in self._taken.items():
            for name in names:
                scope.release(name, col)
                if col is None and (child := self.children.pop(name, None)):
                    if not self._named_by:
                        self._named_by = {}
                    self._named_by[name] = self._method, child
        self._taken = _NOTHING
        if self._places:
            self._places[0][1].clear()
        self.in_compact = True
        self._method = method

    def take(self, scope: "Scope", name: str, module: "Module", child: "Module") -> None:
        """Notes that a submodule is given a name.

        Raises:
            NameInUseError: if it was given before.
            MultipleMethodsCompactError: if another compact method gave it to another module.
        """
        if scope.name_reserved(name):
            raise NameInUseError(f"submodule {type(child).__name__}", name, module._shown)
        if self.place is not None:
            return  # it is made anew in each call of the method
        if self.in_compact and name in self._named_by:
            method, before = self._named_by[name]
            if method != self._method and before != child.clone(name=name):
                raise MultipleMethodsCompactError(
                    type(module).__name__, name, (method, self._method)
                )
        if not self.children:
            self.children = {}
        self.children[name] = child
        self.note(name, None)

    def note(self, name: str, col: str | None) -> None:
        """Notes a name that the next call of a compact method may give again."""
        if self.in_compact:
            if not self._taken:
                self._taken = {}
            self._taken.setdefault(col, []).append(name)

    def next_name(self, prefix: str) -> str:
        """A name for a submodule that has none."""
        cursor = self._all_places()[-1][1]
        n = cursor.get(prefix, 0)
        cursor[prefix] = n + 1
        return f"{prefix}_{n}"

    def named_elsewhere(self, cursor: Mapping[str, int]) -> None:
        """Takes over how many submodules another copy of the module has named by themselves."""
        if cursor and self.names_submodules:
            self._all_places()[-1][1].update(cursor)

    def _all_places(self) -> "list[tuple[Scope | None, dict[str, int]]]":
        """The places that are open, the module's own scope first, each with its cursor."""
        if not self._places:
            self._places = [(None, {})]
        return self._places

    @contextlib.contextmanager
    def at(self, place: "Scope | None" = None) -> Iterator[None]:
        """A context in which submodules are made at a place, by default the module's own scope."""
        places = self._all_places()
        places.append(places[0] if place is None else (place, {}))
        try:
            yield
        finally:
            places.pop()

    def name_scope(self, module: "Module", name: str) -> contextlib.AbstractContextManager[None]:
        """A context in which submodules are made below a scope with the name of a method.

        Raises:
            NameInUseError: if a submodule or a variable has the name.
        """
        scope: Any = module.scope
        if scope.name_reserved(name) and name not in self._name_scopes:
            raise NameInUseError("compact_name_scope", name, module._shown)
        self._name_scopes |= {name}
        return self.at(scope.push(name, reuse=True))

    def resume(
        self,
        module: "Module",
        in_compact: bool,
        place: str | None,
        cursor: dict[str, int],
        inside: frozenset[Any],
        own_names: "Names",
    ) -> None:
        """Goes on where another copy of the module is."""
        scope: Any = module.scope
        if own_names:
            self.own_names = own_names
            scope.take_names(own_names)
        self.in_compact, self.inside = in_compact, inside
        if place is not None:
            self._name_scopes |= {place}
            self._all_places().append((scope.push(place, reuse=True), dict(cursor)))
        elif cursor:
            self._places = [(None, dict(cursor))]
