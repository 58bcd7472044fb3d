"""Transfer of modules through a transformation.

The scopes of modules cross as leaves of a pytree. Its structure contains the modules' classes and
fields; two modules are equal if they compute the same, wherever they are in their trees. Inside,
new modules are created on the inner scopes. Modules in a function's closure cross too and
temporarily hold the inner scopes during the call. Variables in arguments and fields cross like
modules. A module that is not bound crosses with an empty scope, and is not bound inside.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple

import jax

from weft import errors, struct
from weft.core.frozen_dict import FrozenDict
from weft.core.scope import Names, Scope, Variable
from weft.lifting.static_keys import IdentityKey, value_key
from weft.linen.module import Module, is_module, map_submodules
from weft.linen.state import PATH_READERS, RUNNING, name_of


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ModuleRef:
    """Placeholder of a module or a variable in arguments and fields while it crosses."""

    index: int


Unpack = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]


class TransformToken:
    """Identity of a transformed class, to mark modules inside of its transformation."""


class _Spec(NamedTuple):
    """Module or variable without its scope.

    `path` is set only where it matters, see `state.PATH_READERS`.
    """

    cls: type[Any]
    fields: dict[str, Any]
    is_bound: bool = True
    name: str | None = None
    path: tuple[str, ...] | None = None
    in_compact: bool = False
    place: str | None = None
    counters: dict[str, int] = {}
    transform_tokens: frozenset[TransformToken] = frozenset()
    own_names: Names = {}


class ModuleDef:
    """Modules of a call, as a hashable value that is compared by content.

    Attributes:
        captured: for each function, the modules in its closure.
    """

    def __init__(
        self, specs: Sequence[_Spec], target: object, captured: Any, options: dict[str, Any]
    ):
        self.specs = specs
        self.target = target
        self.captured = captured
        self.options = options
        self._key = (
            tuple(map(_spec_key, specs)),
            jax.tree.structure(target),
            captured,
            tuple((name, value_key(value)) for name, value in options.items()),
            tuple(map(IdentityKey, RUNNING.interceptors)),
        )
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleDef) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


def _spec_key(p: _Spec) -> Hashable:
    fields = tuple((name, _field_key(value)) for name, value in p.fields.items())
    counters, own_names = tuple(sorted(p.counters.items())), frozenset(p.own_names.items())
    compared = p.is_bound, p.path, p.in_compact, p.place, p.transform_tokens
    return p.cls, fields, counters, own_names, compared


def _field_key(value: object) -> Hashable:
    if isinstance(value, ModuleRef):
        return value
    if isinstance(value, tuple):
        return type(value), tuple(map(_field_key, value))
    if isinstance(value, FrozenDict):
        return tuple((value_key(name), _field_key(v)) for name, v in value.items())
    return value_key(value)


@jax.tree_util.register_pytree_node_class
class ModuleState:
    """Scopes of modules, as a pytree whose structure contains the modules."""

    def __init__(self, module_def: ModuleDef, scopes: Sequence[Any]):
        self.module_def = module_def
        self.scopes = tuple(scopes)

    def tree_flatten(self) -> tuple[tuple[Any, ...], ModuleDef]:
        return self.scopes, self.module_def

    @classmethod
    def tree_unflatten(cls, module_def: ModuleDef, scopes: Sequence[Any]) -> "ModuleState":
        return cls(module_def, scopes)

    def target_refs(self) -> list[ModuleRef]:
        """Returns the refs of the modules in the function's first argument."""
        return jax.tree.leaves(self.module_def.target, is_leaf=_is_module_ref)

    def target_structure(self) -> Any:
        """Returns the structure of the function's first argument."""
        return jax.tree.structure(self.module_def.target, is_leaf=_is_module_ref)

    def modules(self) -> list[Any]:
        """Creates the modules and variables on the scopes."""
        made: dict[int, Any] = {}

        def module(i: int) -> Any:
            if i not in made:
                p, scope = self.module_def.specs[i], self.scopes[i]
                fields = {name: _replace_refs(value, module) for name, value in p.fields.items()}
                if issubclass(p.cls, Variable):
                    made[i] = p.cls(scope, **fields)
                    return made[i]
                made[i] = p.cls(**fields, parent=scope if p.is_bound else None, name=p.name)
                made[i]._state.resume(made[i], p)
            return made[i]

        for scope in self.scopes:
            if scope.parent is not None:  # a module above makes this one again in its `setup`
                scope.parent.release(scope.name)
        return [module(i) for i in range(len(self.scopes))]


def _replace_refs(value: object, module: Callable[[int], Any]) -> Any:
    return map_submodules(lambda _, ref: module(ref.index), value, _is_module_ref)


def _is_module_ref(x: object) -> bool:
    return isinstance(x, ModuleRef)


def _crosses(x: object) -> bool:
    return isinstance(x, Module | Variable)


class ModuleSplitter:
    """Extractor of modules and variables from the arguments of a lifted function."""

    def __init__(self, target: object, token: TransformToken | None) -> None:
        self.modules: list[Any] = []
        self.scopes: list[Scope] = []
        self._target = target
        self._token = token
        self._refs: dict[int, ModuleRef] = {}
        self.specs: list[Any] = []

    def ref(self, x: Module | Variable[Any]) -> ModuleRef:
        """Adds a module, with those in its fields, or a variable."""
        if id(x) not in self._refs:
            self._refs[id(x)] = ref = ModuleRef(len(self.modules))
            self.modules.append(x)
            self.scopes.append(Scope({}) if x.scope is None else x.scope)
            self.specs.append(None)
            self.specs[ref.index] = self._spec(x)
        return self._refs[id(x)]

    def _spec(self, x: Module | Variable[Any]) -> _Spec:
        if isinstance(x, Variable):
            return _Spec(type(x), {name: of for name, of in vars(x).items() if name != "scope"})
        fields = {
            name: map_submodules(lambda _, inner: self.ref(inner), getattr(x, name), _crosses)
            for name in x._field_names
        }
        state = x._state
        tokens = state.transform_tokens
        if self._token is not None and x is self._target:
            tokens |= {self._token}
        if x.scope is None:
            return _Spec(type(x), fields, False, name_of(x), transform_tokens=tokens)
        path = x.scope.path if type(x) in PATH_READERS else None
        place = state.place.name if state.place else None
        running = state.in_compact, place, dict(state.counters), tokens, state.own_names
        return _Spec(type(x), fields, True, name_of(x), path, *running)

    def refs(self, tree: Any) -> Any:
        """Returns a tree of arguments with refs in place of modules and variables."""
        if _crosses(tree):
            return self.ref(tree)
        leaves, structure = jax.tree.flatten(tree, is_leaf=_crosses)
        if not any(map(_crosses, leaves)):
            return tree
        return structure.unflatten([self.ref(x) if _crosses(x) else x for x in leaves])


def merge_modules(
    fn: Callable[..., Any], index: int = 0, unpack: Unpack | None = None
) -> Callable[..., Any]:
    """Converts a function of modules to one of a `ModuleState`, which was split at `index`.

    If given, `unpack` returns the positional and keyword arguments of `fn` for those of the result,
    which `weft.core.lift` then passes without wrappers.
    """

    def run(module_state: ModuleState, *args: object, **kwargs: object) -> Any:
        if unpack is not None:
            args, kwargs = unpack(*args)
        module_def, modules = module_state.module_def, module_state.modules()
        inner = list(modules)
        with _swapped_state(captured_modules(fn), module_def.captured[index], modules):
            target, args, kwargs = jax.tree.map(
                lambda x: modules[x.index] if _is_module_ref(x) else x,
                (module_def.target, args, kwargs),
                is_leaf=_is_module_ref,
            )
            first = jax.tree.leaves(target, is_leaf=is_module)[0]
            RUNNING.module_stack.append(None if first.scope is None else first)
            RUNNING.lifted += 1
            try:
                result = fn(target, *args, **kwargs, **module_def.options)
            finally:
                RUNNING.lifted -= 1
                RUNNING.module_stack.pop()
            # JAX may reuse a trace without calling the function, so this leaves with the results.
            module_state.scopes[0].left_counts = frozenset(
                ((i, name), n)
                for i, module in enumerate(modules)
                if is_module(module)
                for name, n in module._state.counters.items()
            )
        for module in inner:
            if is_module(module) and module.scope is not None:
                module._end_scope()
        leaves = jax.tree.leaves(result, is_leaf=is_module)
        if any(isinstance(x, Module | Scope | Variable) for x in leaves):
            name = getattr(fn, "__name__", "the function")
            raise errors.TransformedMethodReturnValueError(f"{type(first).__name__}: {name}")
        return result

    run.__name__ = getattr(fn, "__name__", "run")
    if unpack is not None:
        run.takes_packed_args = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


_CONTAINER_TYPES = (FunctionType, MethodType, functools.partial, list, tuple, dict)


def captured_modules(fn: object) -> list[Module]:
    """Returns the bound modules that a function captures, directly or through other functions."""
    found: dict[int, Module] = {}
    seen: set[int] = set()
    to_see = list(reversed(_references_of(fn)))
    while to_see:
        value = to_see.pop()
        if isinstance(value, Module):
            if value.scope is not None:
                found[id(value)] = value
        elif (isinstance(value, _CONTAINER_TYPES) or struct.child_names(type(value))) and id(
            value
        ) not in seen:
            seen.add(id(value))
            to_see.extend(reversed(_references_of(value)))
    return list(found.values())


def _references_of(fn: object) -> Sequence[Any]:
    if isinstance(fn, list | tuple):
        return fn
    if isinstance(fn, dict):
        return tuple(fn.values())
    if isinstance(fn, functools.partial):
        return fn.func, fn.args, fn.keywords
    if isinstance(fn, MethodType):
        return fn.__func__, fn.__self__
    if not isinstance(fn, FunctionType):
        return [getattr(fn, name) for name in struct.child_names(type(fn))]
    held = []
    for cell in fn.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:
            continue  # a name that has no value yet
    return *held, fn.__defaults__, fn.__kwdefaults__


@contextlib.contextmanager
def _swapped_state(
    outer: Sequence[Module], refs: Sequence[ModuleRef], inner: list[Module]
) -> Iterator[None]:
    """Enters a context in which outer modules hold the state of the inner ones.

    A closure refers to the caller's module itself, which would use variables of the outer trace.
    """
    before = [dict(vars(module)) for module in outer]
    for module, ref in zip(outer, refs, strict=True):
        _replace_attributes(module, vars(inner[ref.index]))
        inner[ref.index] = module
    try:
        yield
    finally:
        for module, held in zip(outer, before, strict=True):
            _replace_attributes(module, held)


def _replace_attributes(module: Module, held: dict[str, Any]) -> None:
    held = dict(held)
    vars(module).clear()
    vars(module).update(held)


def unbound(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of a module's bound method, to be called with the module inside."""
    return fn.__func__ if isinstance(fn, MethodType) and is_module(fn.__self__) else fn


def split_modules(
    fns: Sequence[Callable[..., Any]],
    target: object,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    token: TransformToken | None = None,
) -> tuple[ModuleSplitter, ModuleState, Any, Any]:
    """Extracts the modules from the arguments of lifted functions.

    Returns the modules, their module_state, and the remaining `args` and `kwargs`. `token` marks
    the target as inside of a transformed class.
    """
    _check_target(fns[0], target)
    splitter = ModuleSplitter(target, token)
    refs = splitter.refs(target)
    args, kwargs = splitter.refs((args, dict(kwargs)))
    captured = tuple(tuple(map(splitter.ref, captured_modules(fn))) for fn in fns)
    options = {name: value for name, value in kwargs.items() if _is_static_argument(value)}
    arrays = {name: value for name, value in kwargs.items() if name not in options}
    module_def = ModuleDef(splitter.specs, refs, captured, options)
    return splitter, ModuleState(module_def, splitter.scopes), args, arrays


def _is_static_argument(value: object) -> bool:
    """Returns whether an argument cannot be mapped or sliced, and thus belongs to the structure."""
    return value is None or isinstance(value, bool | str) or callable(value)


def _check_target(fn: object, target: object) -> None:
    if is_module(target):
        return
    leaves = jax.tree.leaves(target, is_leaf=is_module)
    wrong = [x for x in leaves if not is_module(x)] if leaves else [target]
    if wrong:
        name = getattr(fn, "__name__", "the function")
        raise errors.TransformArgumentError(
            f"{name} is transformed, and its first argument is {wrong[0]!r} of type "
            f"{type(wrong[0]).__name__}; expected a module or a tree of modules. Give the module "
            f"first, as {name}(self, ...)."
        )


def commit_counters(splitter: ModuleSplitter) -> None:
    """Updates the outer modules' numbers of named submodules after a lifted function."""
    counters: dict[int, dict[str, int]] = {}
    for (i, name), n in splitter.scopes[0].left_counts:
        counters.setdefault(i, {})[name] = n
    for i, of_module in counters.items():
        splitter.modules[i]._state.update_counters(of_module)


@contextlib.contextmanager
def lifted_call(
    fns: Sequence[Callable[..., Any]], target: object, args: tuple[Any, ...]
) -> Iterator[tuple[ModuleState, Any]]:
    """Enters a context for the call of a lifted function, with its first and its other arguments.

    See `split_modules`.
    """
    splitter, module_state, args, _ = split_modules(fns, target, args)
    yield module_state, args
    commit_counters(splitter)
