"""Modules on their trip through a transformation.

What crosses are the scopes of modules. The modules themselves, their classes and fields, are the
structure of the pytree that the scopes are in, and two of them are equal if they would run alike:
where they are in their tree makes no difference. Inside, fresh modules are made on the scopes that
came through. Modules that a function sees in its closure cross as well; there they are given the
inner scopes for the time of the call.
"""

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from weft.core.frozen_dict import FrozenDict
from weft.core.scope import Scope
from weft.core.variable import Variable
from weft.errors import TransformedMethodReturnValueError, UnboundModuleError
from weft.lifting.functions import by_value, shared_by_equal_functions
from weft.linen.module import Module
from weft.linen.running import RUNNING
from weft.linen.submodules import map_submodules

_MAX_KNOWN = 64


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Seat:
    """Stands for a module in arguments and fields, while the module crosses."""

    index: int


class Token:
    """Stands for a transformed class: which of its modules are inside of the transformation."""


class _Passenger(NamedTuple):
    """A module without its scope."""

    cls: type[Module]
    fields: dict[str, Any]
    name: str | None
    in_compact: bool
    cursor: dict[str, int]
    inside: frozenset[Token]


class Manifest:
    """The modules of a call: a hashable value, compared by what they are.

    Attributes:
        passengers: the modules.
        target: the tree of the modules that the function is given first.
        captured: for each function, those that it sees in its closure.
        options: the arguments that are no arrays, by name.
        cursors: for each passenger, how many submodules it has named when the functions end.
    """

    def __init__(
        self, passengers: Sequence[_Passenger], target: Any, captured: Any, options: dict[str, Any]
    ):
        self.passengers = passengers
        self.target = target
        self.captured = captured
        self.options = options
        self.cursors: list[dict[str, int]] | None = None
        self._key = (
            tuple(
                (
                    p.cls,
                    tuple((name, _key(value)) for name, value in p.fields.items()),
                    p.in_compact,
                    tuple(sorted(p.cursor.items())),
                    p.inside,
                )
                for p in passengers
            ),
            jax.tree.structure(target),
            captured,
            tuple((name, by_value(value)) for name, value in options.items()),
        )
        self._hash = hash(self._key)

    def reach(self, cursors: Sequence[dict[str, int]]) -> None:
        """Notes how many submodules were named by one of the functions."""
        before = self.cursors or [{}] * len(cursors)
        self.cursors = [
            {name: max(old.get(name, 0), new.get(name, 0)) for name in {**old, **new}}
            for old, new in zip(before, cursors, strict=True)
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


def _key(value: Any) -> Hashable:
    """What stands for a field in a comparison."""
    if isinstance(value, Seat):
        return value
    if isinstance(value, tuple):
        return type(value), tuple(map(_key, value))
    if isinstance(value, FrozenDict):
        return tuple((by_value(name), _key(v)) for name, v in value.items())
    return by_value(value)


@jax.tree_util.register_pytree_node_class
class Carriage:
    """The scopes of modules, as a pytree whose structure says what the modules are."""

    def __init__(self, manifest: Manifest, scopes: Sequence[Any]):
        self.manifest = manifest
        self.scopes = tuple(scopes)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Manifest]:
        return self.scopes, self.manifest

    @classmethod
    def tree_unflatten(cls, manifest: Manifest, scopes: Sequence[Any]) -> "Carriage":
        return cls(manifest, scopes)

    def target_seats(self) -> list[Seat]:
        """The modules that the function is given first."""
        return jax.tree.leaves(self.manifest.target, is_leaf=_is_seat)

    def target_structure(self) -> Any:
        """The structure of the tree of these modules."""
        return jax.tree.structure(self.manifest.target, is_leaf=_is_seat)

    def modules(self) -> list[Module]:
        """The modules, made anew on the scopes."""
        made: dict[int, Module] = {}

        def module(i: int) -> Module:
            if i not in made:
                p = self.manifest.passengers[i]
                fields = {name: _replaced(value, module) for name, value in p.fields.items()}
                made[i] = p.cls(**fields, parent=self.scopes[i], name=p.name)
                made[i]._state.in_compact = p.in_compact
                made[i]._state.cursor = dict(p.cursor)
                made[i]._state.inside = p.inside
            return made[i]

        return [module(i) for i in range(len(self.scopes))]


def _replaced(value: Any, module: Callable[[int], Module]) -> Any:
    return map_submodules(lambda _, seat: module(seat.index), value, _is_seat)


def _is_seat(x: Any) -> bool:
    return isinstance(x, Seat)


class Boarding:
    """Takes the modules out of what a lifted function is given."""

    def __init__(self, target: Any, token: Token | None) -> None:
        self.modules: list[Module] = []
        self._target = target
        self._token = token
        self._seats: dict[int, Seat] = {}
        self._passengers: list[_Passenger | None] = []

    def seat(self, module: Module) -> Seat:
        """Takes in a module, and those in its fields.

        Raises:
            UnboundModuleError: if it has no variables.
        """
        if module.scope is None:
            raise UnboundModuleError("a lifted function was called", type(module).__name__)
        if id(module) not in self._seats:
            self._seats[id(module)] = seat = Seat(len(self.modules))
            self.modules.append(module)
            self._passengers.append(None)
            fields = {
                name: map_submodules(lambda _, m: self.seat(m), getattr(module, name), _is_module)
                for name in module._field_names
            }
            state = module._state
            self._passengers[seat.index] = _Passenger(
                type(module),
                fields,
                module.name,
                state.in_compact,
                dict(state.cursor),
                state.inside | {self._token}
                if self._token is not None and module is self._target
                else state.inside,
            )
        return self._seats[id(module)]

    def seats(self, tree: Any) -> Any:
        """A tree of arguments with seats where modules were."""
        return jax.tree.map(
            lambda x: self.seat(x) if _is_module(x) else x, tree, is_leaf=_is_module
        )

    def carriage(
        self, target: Any, captured: Sequence[tuple[Seat, ...]], options: dict[str, Any]
    ) -> Carriage:
        """All that was taken in."""
        manifest = Manifest(self._passengers, target, tuple(captured), options)  # pyright: ignore[reportArgumentType]
        return Carriage(manifest, [module.scope for module in self.modules])


def _is_module(x: Any) -> bool:
    return isinstance(x, Module)


def inside(fn: Callable[..., Any], index: int = 0) -> Callable[..., Any]:
    """A function of a carriage from a function of modules.

    Args:
        fn: `fn(target, *args, **kwargs)`.
        index: which one it is of the functions that `board` was given.
    """

    def run(carriage: Carriage, *args: Any, **kwargs: Any) -> Any:
        manifest, modules = carriage.manifest, carriage.modules()
        with _in_place(captured_modules(fn), manifest.captured[index], modules):
            target, args, kwargs = jax.tree.map(
                lambda x: modules[x.index] if _is_seat(x) else x,
                (manifest.target, args, kwargs),
                is_leaf=_is_seat,
            )
            first = jax.tree.leaves(target, is_leaf=_is_module)[0]
            RUNNING.modules.append(first)
            try:
                result = fn(target, *args, **kwargs, **manifest.options)
            finally:
                RUNNING.modules.pop()
            manifest.reach([module._state.cursor for module in modules])
        leaves = jax.tree.leaves(result, is_leaf=_is_module)
        if any(isinstance(x, Module | Scope | Variable) for x in leaves):
            name = getattr(fn, "__name__", "the function")
            raise TransformedMethodReturnValueError(f"{type(first).__name__}: {name}")
        return result

    return run


def captured_modules(fn: Any) -> list[Module]:
    """The bound modules that a function sees in its closure."""
    cells = getattr(fn, "__closure__", None) or ()
    found = []
    for cell in cells:
        with contextlib.suppress(ValueError):  # a name that has no value yet
            found += [x for x in _modules_in(cell.cell_contents) if x.scope is not None]
    return found


def _modules_in(value: Any) -> list[Module]:
    if isinstance(value, Module):
        return [value]
    if isinstance(value, list | tuple):
        return [module for x in value for module in _modules_in(x)]
    if isinstance(value, dict):
        return [module for x in value.values() for module in _modules_in(x)]
    return []


@contextlib.contextmanager
def _in_place(
    outer: Sequence[Module], seats: Sequence[Seat], inner: list[Module]
) -> Iterator[None]:
    """A context in which modules from outside are, themselves, what came through of them."""
    before = [dict(vars(module)) for module in outer]
    for module, seat in zip(outer, seats, strict=True):
        _become(module, vars(inner[seat.index]))
        inner[seat.index] = module
    try:
        yield
    finally:
        for module, held in zip(outer, before, strict=True):
            _become(module, held)


def _become(module: Module, held: dict[str, Any]) -> None:
    held = dict(held)
    vars(module).clear()
    vars(module).update(held)


def board(
    fns: Sequence[Callable[..., Any]],
    target: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    token: Token | None = None,
) -> tuple[Boarding, Carriage, Any, Any]:
    """Splits what lifted functions are given.

    Args:
        fns: the functions.
        target: the modules that they are given first.
        args: their other arguments.
        kwargs: those with a name.
        token: what the target is inside of then.

    Returns:
        The modules, their carriage, and `args` and `kwargs` as they cross.
    """
    boarding = Boarding(target, token)
    seats, args, kwargs = boarding.seats((target, args, dict(kwargs)))
    captured = [tuple(map(boarding.seat, captured_modules(fn))) for fn in fns]
    options = {name: value for name, value in kwargs.items() if _is_option(value)}
    arrays = {name: value for name, value in kwargs.items() if name not in options}
    return boarding, boarding.carriage(seats, captured, options), args, arrays


def _is_option(value: Any) -> bool:
    """Whether an argument cannot be mapped or sliced, so that it is part of the structure."""
    return value is None or isinstance(value, bool | str) or callable(value)


def arrive(fns: Sequence[Callable[..., Any]], boarding: Boarding, carriage: Carriage) -> None:
    """Goes on naming submodules where the functions have stopped, also if none was run again."""
    if not any(module._state.in_compact for module in boarding.modules):
        return
    known = shared_by_equal_functions(("cursors", *fns), lambda: OrderedDict[Manifest, Any]())
    manifest = carriage.manifest
    if manifest.cursors is None:  # JAX has run what it had traced for an equal call
        manifest.cursors = known.get(manifest, [])
    known[manifest] = manifest.cursors
    if len(known) > _MAX_KNOWN:
        known.popitem(last=False)
    for module, cursor in zip(boarding.modules, manifest.cursors or (), strict=False):
        if module._state.in_compact:
            module._state.cursor.update(cursor)
