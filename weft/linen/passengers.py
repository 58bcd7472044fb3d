"""Transfer of modules through a transformation.

The scopes of modules cross as leaves of a pytree. Its structure contains the modules' classes and
fields; two modules are equal if they compute the same, wherever they are in their trees. Inside,
new modules are created on the inner scopes. Modules in a function's closure cross too and
temporarily hold the inner scopes during the call.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple

import jax

from weft.core.frozen_dict import FrozenDict
from weft.core.scope import Names, Scope
from weft.core.variable import Variable
from weft.errors import (
    TransformArgumentError,
    TransformedMethodReturnValueError,
    UnboundModuleError,
)
from weft.lifting.functions import Same, by_value
from weft.linen.module import Module
from weft.linen.running import PLACED, RUNNING, name_of
from weft.linen.submodules import map_submodules
from weft.struct import child_names


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Seat:
    """Placeholder of a module in arguments and fields while it crosses."""

    index: int


class Token:
    """Identity of a transformed class, to mark modules inside of its transformation."""


class _Passenger(NamedTuple):
    """Module without its scope; `path` is set only where it matters, see `running.PLACED`."""

    cls: type[Module]
    fields: dict[str, Any]
    name: str | None
    path: tuple[str, ...] | None
    in_compact: bool
    place: str | None
    cursor: dict[str, int]
    inside: frozenset[Token]
    own_names: Names


class Manifest:
    """Modules of a call, as a hashable value that is compared by content.

    Attributes:
        captured: for each function, the modules in its closure.
        options: arguments that are not arrays, by name.
        cursors: for each passenger, the number of submodules named when the functions end.
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
                    p.path,
                    p.in_compact,
                    p.place,
                    tuple(sorted(p.cursor.items())),
                    p.inside,
                    frozenset(p.own_names.items()),
                )
                for p in passengers
            ),
            jax.tree.structure(target),
            captured,
            tuple((name, by_value(value)) for name, value in options.items()),
            tuple(map(Same, RUNNING.interceptors)),
        )
        self._hash = hash(self._key)

    def reach(self, cursors: Sequence[dict[str, int]]) -> None:
        """Updates the cursors with those of one of the functions."""
        before = self.cursors or [{}] * len(cursors)
        self.cursors = [
            {name: max(old.get(name, 0), new.get(name, 0)) for name in {**old, **new}}
            for old, new in zip(before, cursors, strict=True)
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


class _Log:
    """Wrapper of a manifest that equals any other."""

    def __init__(self, manifest: Manifest):
        self.manifest = manifest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Log)

    def __hash__(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class _NoKey:
    """Empty key in the path of a logged value."""

    def __str__(self) -> str:
        return ""


@jax.tree_util.register_pytree_with_keys_class
class Logged:
    """Result with the manifest of the traced call.

    JAX may rerun a trace without calling the functions; the structure of the result then provides
    the numbers of submodules that they named.
    """

    def __init__(self, value: Any, carriage: "Carriage"):
        self.value = value
        self.manifest = carriage.manifest

    def tree_flatten(self) -> tuple[tuple[Any], _Log]:
        return (self.value,), _Log(self.manifest)

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[_NoKey, Any]], _Log]:
        return ((_NoKey(), self.value),), _Log(self.manifest)

    @classmethod
    def tree_unflatten(cls, log: _Log, values: tuple[Any]) -> "Logged":
        logged = object.__new__(cls)
        (logged.value,), logged.manifest = values, log.manifest
        return logged

    def read(self, carriage: "Carriage") -> Any:
        """Returns the value, after copying the cursors to the manifest of another call."""
        carriage.manifest.cursors = self.manifest.cursors
        return self.value


def _key(value: Any) -> Hashable:
    """Returns a field's value in comparable form."""
    if isinstance(value, Seat):
        return value
    if isinstance(value, tuple):
        return type(value), tuple(map(_key, value))
    if isinstance(value, FrozenDict):
        return tuple((by_value(name), _key(v)) for name, v in value.items())
    return by_value(value)


@jax.tree_util.register_pytree_node_class
class Carriage:
    """Scopes of modules, as a pytree whose structure contains the modules."""

    def __init__(self, manifest: Manifest, scopes: Sequence[Any]):
        self.manifest = manifest
        self.scopes = tuple(scopes)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Manifest]:
        return self.scopes, self.manifest

    @classmethod
    def tree_unflatten(cls, manifest: Manifest, scopes: Sequence[Any]) -> "Carriage":
        return cls(manifest, scopes)

    def target_seats(self) -> list[Seat]:
        """Returns the seats of the modules in the function's first argument."""
        return jax.tree.leaves(self.manifest.target, is_leaf=_is_seat)

    def target_structure(self) -> Any:
        """Returns the structure of the function's first argument."""
        return jax.tree.structure(self.manifest.target, is_leaf=_is_seat)

    def modules(self) -> list[Module]:
        """Creates the modules on the scopes."""
        made: dict[int, Module] = {}

        def module(i: int) -> Module:
            if i not in made:
                p = self.manifest.passengers[i]
                fields = {name: _replaced(value, module) for name, value in p.fields.items()}
                made[i] = p.cls(**fields, parent=self.scopes[i], name=p.name)
                made[i]._state.resume(
                    made[i], p.in_compact, p.place, p.cursor, p.inside, p.own_names
                )
            return made[i]

        for scope in self.scopes:
            if scope.parent is not None:  # a module above makes this one again in its `setup`
                scope.parent.release(scope.name)
        return [module(i) for i in range(len(self.scopes))]


def _replaced(value: Any, module: Callable[[int], Module]) -> Any:
    return map_submodules(lambda _, seat: module(seat.index), value, _is_seat)


def _is_seat(x: Any) -> bool:
    return isinstance(x, Seat)


class Boarding:
    """Extractor of modules from the arguments of a lifted function."""

    def __init__(self, target: Any, token: Token | None) -> None:
        self.modules: list[Module] = []
        self._target = target
        self._token = token
        self._seats: dict[int, Seat] = {}
        self._passengers: list[_Passenger | None] = []

    def seat(self, module: Module) -> Seat:
        """Adds a module and those in its fields; raises UnboundModuleError if it is not bound."""
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
                name_of(module),
                module.scope.path if type(module) in PLACED else None,
                state.in_compact,
                state.place.name if state.place else None,
                dict(state.cursor),
                state.inside | {self._token}
                if self._token is not None and module is self._target
                else state.inside,
                state.own_names,
            )
        return self._seats[id(module)]

    def seats(self, tree: Any) -> Any:
        """Returns a tree of arguments with seats in place of modules."""
        if _is_module(tree):
            return self.seat(tree)
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_module)
        if not any(map(_is_module, leaves)):
            return tree
        return structure.unflatten([self.seat(x) if _is_module(x) else x for x in leaves])

    def carriage(
        self, target: Any, captured: Sequence[tuple[Seat, ...]], options: dict[str, Any]
    ) -> Carriage:
        """Returns the carriage of all added modules."""
        manifest = Manifest(self._passengers, target, tuple(captured), options)  # pyright: ignore[reportArgumentType]
        return Carriage(manifest, [module.scope for module in self.modules])


def _is_module(x: Any) -> bool:
    return isinstance(x, Module)


def inside(fn: Callable[..., Any], index: int = 0) -> Callable[..., Any]:
    """Converts a function of modules to one of a carriage; `board` was given it at `index`."""

    def run(carriage: Carriage, *args: Any, **kwargs: Any) -> Any:
        manifest, modules = carriage.manifest, carriage.modules()
        made = list(modules)
        with _in_place(captured_modules(fn), manifest.captured[index], modules):
            target, args, kwargs = jax.tree.map(
                lambda x: modules[x.index] if _is_seat(x) else x,
                (manifest.target, args, kwargs),
                is_leaf=_is_seat,
            )
            first = jax.tree.leaves(target, is_leaf=_is_module)[0]
            RUNNING.modules.append(first)
            RUNNING.lifted += 1
            try:
                result = fn(target, *args, **kwargs, **manifest.options)
            finally:
                RUNNING.lifted -= 1
                RUNNING.modules.pop()
            manifest.reach([module._state.cursor for module in modules])
        for module in made:
            module._let_go()
        leaves = jax.tree.leaves(result, is_leaf=_is_module)
        if any(isinstance(x, Module | Scope | Variable) for x in leaves):
            name = getattr(fn, "__name__", "the function")
            raise TransformedMethodReturnValueError(f"{type(first).__name__}: {name}")
        return result

    run.__name__ = getattr(fn, "__name__", "run")
    return run


_HOLDERS = (FunctionType, MethodType, functools.partial, list, tuple, dict)


def captured_modules(fn: Any) -> list[Module]:
    """Returns the bound modules that a function captures, directly or through other functions."""
    found: dict[int, Module] = {}
    seen: set[int] = set()
    to_see = list(reversed(_held(fn)))
    while to_see:
        value = to_see.pop()
        if isinstance(value, Module):
            if value.scope is not None:
                found[id(value)] = value
        elif (isinstance(value, _HOLDERS) or child_names(type(value))) and id(value) not in seen:
            seen.add(id(value))
            to_see.extend(reversed(_held(value)))
    return list(found.values())


def _held(fn: Any) -> Sequence[Any]:
    if isinstance(fn, list | tuple):
        return fn
    if isinstance(fn, dict):
        return tuple(fn.values())
    if isinstance(fn, functools.partial):
        return fn.func, fn.args, fn.keywords
    if isinstance(fn, MethodType):
        return fn.__func__, fn.__self__
    if not isinstance(fn, FunctionType):
        return [getattr(fn, name) for name in child_names(type(fn))]
    held = []
    for cell in fn.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:
            continue  # a name that has no value yet
    return *held, fn.__defaults__, fn.__kwdefaults__


@contextlib.contextmanager
def _in_place(
    outer: Sequence[Module], seats: Sequence[Seat], inner: list[Module]
) -> Iterator[None]:
    """Enters a context in which outer modules hold the state of the inner ones."""
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
    """Extracts the modules from the arguments of lifted functions.

    Returns the modules, their carriage, and the remaining `args` and `kwargs`. `token` marks the
    target as inside of a transformed class.
    """
    _check_target(fns[0], target)
    boarding = Boarding(target, token)
    seats = boarding.seats(target)
    args, kwargs = boarding.seats((args, dict(kwargs)))
    captured = [tuple(map(boarding.seat, captured_modules(fn))) for fn in fns]
    options = {name: value for name, value in kwargs.items() if _is_option(value)}
    arrays = {name: value for name, value in kwargs.items() if name not in options}
    return boarding, boarding.carriage(seats, captured, options), args, arrays


def _is_option(value: Any) -> bool:
    """Returns whether an argument cannot be mapped or sliced, and thus belongs to the structure."""
    return value is None or isinstance(value, bool | str) or callable(value)


def _check_target(fn: Any, target: Any) -> None:
    if _is_module(target):
        return
    leaves = jax.tree.leaves(target, is_leaf=_is_module)
    wrong = [x for x in leaves if not _is_module(x)] if leaves else [target]
    if wrong:
        name = getattr(fn, "__name__", "the function")
        raise TransformArgumentError(
            f"{name} is transformed, and its first argument is {wrong[0]!r} of type "
            f"{type(wrong[0]).__name__}; expected a module or a tree of modules. Give the module "
            f"first, as {name}(self, ...)."
        )


def arrive(boarding: Boarding, carriage: Carriage) -> None:
    """Copies the numbers of named submodules back to the outer modules."""
    for module, cursor in zip(boarding.modules, carriage.manifest.cursors or (), strict=False):
        module._state.named_elsewhere(cursor)
