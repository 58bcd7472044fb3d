"""Runtime state of a bound module: its submodules and used names."""

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
    """Progress of the method `setup`."""

    DUE = enum.auto()
    RUNS = enum.auto()
    DONE = enum.auto()


_NOTHING: Any = MappingProxyType({})


class State:
    """Part of a module that is not its fields.

    Most modules have no submodules and few names, and the garbage collector runs several times per
    trace. Instances therefore hold only values that differ from the class's.

    Attributes:
        given: original values of fields that hold modules.
        inside: transformations of the module's class that the module is inside of.
        own_names: names used by `setup` and the fields. They cross transformations with the module,
            so that a function inside cannot reuse a name.
        adopted: by identity, modules given to this module or one above, and their bound copies.
            Keeping the originals prevents reuse of an identity.
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
        """The scope for submodules, if it is below a scope with the name of a method."""
        return self._places[-1][0] if self._places else None

    @property
    def cursor(self) -> dict[str, int]:
        """The number of automatically named submodules at this place, by class name."""
        return self._places[-1][1] if self._places else _NOTHING

    @property
    def names_submodules(self) -> bool:
        """True if a method runs that can create submodules without an attribute."""
        return self.in_compact or self.place is not None

    def begin_compact(self, module: "Module", method: str) -> None:
        """Releases the names used by a previous call of a compact method."""
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
        """Records the name of a new submodule; raises an error if the name is taken."""
        if scope.name_reserved(name):
            raise NameInUseError(f"submodule {type(child).__name__}", name, module._shown)
        if self.place is not None:
            return  # each call of the method creates it again
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
        """Records a name that the next call of a compact method may use again."""
        if self.in_compact:
            if not self._taken:
                self._taken = {}
            self._taken.setdefault(col, []).append(name)

    def next_name(self, prefix: str) -> str:
        """Returns a name for a submodule without one."""
        cursor = self._all_places()[-1][1]
        n = cursor.get(prefix, 0)
        cursor[prefix] = n + 1
        return f"{prefix}_{n}"

    def named_elsewhere(self, cursor: Mapping[str, int]) -> None:
        """Updates the numbers of named submodules with those of another copy of the module."""
        if cursor and self.names_submodules:
            self._all_places()[-1][1].update(cursor)

    def _all_places(self) -> "list[tuple[Scope | None, dict[str, int]]]":
        """Returns the open places with their cursors, the module's own scope first."""
        if not self._places:
            self._places = [(None, {})]
        return self._places

    @contextlib.contextmanager
    def at(self, place: "Scope | None" = None) -> Iterator[None]:
        """Enters a context that creates submodules at a place, by default the module's scope."""
        places = self._all_places()
        places.append(places[0] if place is None else (place, {}))
        try:
            yield
        finally:
            places.pop()

    def name_scope(self, module: "Module", name: str) -> contextlib.AbstractContextManager[None]:
        """Returns a context that creates submodules in a scope with the name of a method."""
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
        """Takes over the state of another copy of the module."""
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
