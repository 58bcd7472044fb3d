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
from typing import Any, NamedTuple, TypeGuard

import jax

from weft import errors, struct
from weft.core.frozen_dict import FrozenDict
from weft.core.scope import Names, Scope, Variable
from weft.lifting.static_keys import IdentityKey, value_key
from weft.linen.module import Module, is_module, map_submodules
from weft.linen.state import PATH_READERS, RUNNING, name_of
from weft.typing import Fn, PyTree

Carried = Module | Variable[Any]
Arguments = tuple[tuple[PyTree, ...], dict[str, PyTree]]
Unpack = Callable[..., Arguments]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ModuleRef:
    """Placeholder of a module or a variable in arguments and fields while it crosses."""

    index: int


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
        options: keyword arguments that are not arrays.
    """

    def __init__(
        self,
        specs: Sequence[_Spec],
        target: PyTree,
        captured: tuple[tuple[ModuleRef, ...], ...],
        options: dict[str, Any],
    ):
        self.specs = specs
        self.target = target
        self.captured = captured
        self.options = options
        option_keys = [
            (name, value_key(value)) for name, value in options.items()
        ]
        self._key = (
            tuple(map(_spec_key, specs)),
            jax.tree.structure(target),
            captured,
            tuple(option_keys),
            # Interceptors run inside, so a trace with others is another one.
            tuple(map(IdentityKey, RUNNING.interceptors)),
        )
        self._hash = hash(self._key)  # JAX asks for it several times in a call

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleDef) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


def _spec_key(spec: _Spec) -> Hashable:
    fields = [(name, _field_key(value)) for name, value in spec.fields.items()]
    # Without the name: modules that differ only in it compute the same.
    return (
        spec.cls,
        tuple(fields),
        frozenset(spec.counters.items()),
        frozenset(spec.own_names.items()),
        spec.is_bound,
        spec.path,
        spec.in_compact,
        spec.place,
        spec.transform_tokens,
    )


def _field_key(value: PyTree) -> Hashable:
    if isinstance(value, ModuleRef):
        return value
    if isinstance(value, tuple):
        return type(value), tuple(map(_field_key, value))
    if isinstance(value, FrozenDict):
        return tuple(
            (value_key(name), _field_key(item)) for name, item in value.items()
        )
    return value_key(value)


@jax.tree_util.register_pytree_node_class
class ModuleState:
    """Scopes of modules, as a pytree whose structure contains the modules."""

    def __init__(self, module_def: ModuleDef, scopes: Sequence[PyTree]):
        self.module_def = module_def
        self.scopes = tuple(scopes)

    def tree_flatten(self) -> tuple[tuple[PyTree, ...], ModuleDef]:
        return self.scopes, self.module_def

    @classmethod
    def tree_unflatten(
        cls, module_def: ModuleDef, scopes: Sequence[PyTree]
    ) -> "ModuleState":
        return cls(module_def, scopes)

    def target_refs(self) -> list[ModuleRef]:
        """Returns the refs of the modules in the function's first argument."""
        return jax.tree.leaves(self.module_def.target, is_leaf=_is_module_ref)

    def target_structure(self) -> Any:
        """Returns the structure of the function's first argument."""
        return jax.tree.structure(
            self.module_def.target, is_leaf=_is_module_ref
        )

    def modules(self) -> list[Any]:
        """Creates the modules and variables on the scopes."""
        for scope in self.scopes:
            if (
                scope.parent is not None
            ):  # a module above makes this one again in its `setup`
                scope.parent.release(scope.name)
        created: dict[int, Any] = {}

        def create(ref: ModuleRef) -> Any:
            if ref.index in created:
                return created[ref.index]
            spec, scope = (
                self.module_def.specs[ref.index],
                self.scopes[ref.index],
            )
            # Modules in fields come first, in their order.
            fields: dict[str, Any] = {}
            for name, value in spec.fields.items():
                fields[name] = map_submodules(
                    lambda _, inner: create(inner), value, _is_module_ref
                )
            if issubclass(spec.cls, Variable):
                created[ref.index] = spec.cls(scope, **fields)
            else:
                parent = scope if spec.is_bound else None
                module = spec.cls(**fields, parent=parent, name=spec.name)
                module._state.resume(module, spec)
                created[ref.index] = module
            return created[ref.index]

        return [create(ModuleRef(index)) for index in range(len(self.scopes))]


def _is_module_ref(leaf: object) -> TypeGuard[ModuleRef]:
    return isinstance(leaf, ModuleRef)


def _is_carried(leaf: object) -> TypeGuard[Carried]:
    return isinstance(leaf, Module | Variable)


class ModuleSplitter:
    """Extractor of modules and variables from the arguments of a lifted function.

    `modules`, `scopes` and `specs` have an entry for each, in the order of the refs.
    """

    def __init__(self, target: PyTree, token: TransformToken | None) -> None:
        self.modules: list[Any] = []
        self.scopes: list[Scope] = []
        self.specs: list[Any] = []
        self._target = target
        self._token = token
        self._refs_by_id: dict[int, ModuleRef] = {}

    def ref(self, carried: Carried) -> ModuleRef:
        """Adds a module, with those in its fields, or a variable."""
        if id(carried) not in self._refs_by_id:
            ref = ModuleRef(len(self.modules))
            self._refs_by_id[id(carried)] = ref
            self.modules.append(carried)
            self.scopes.append(
                Scope({}) if carried.scope is None else carried.scope
            )
            self.specs.append(
                None
            )  # those in its fields are added before its spec is known
            self.specs[ref.index] = self._spec(carried)
        return self._refs_by_id[id(carried)]

    def _spec(self, carried: Carried) -> _Spec:
        fields: dict[str, Any] = {}
        if isinstance(carried, Variable):
            fields.update(vars(carried))
            del fields["scope"]
            return _Spec(type(carried), fields)
        for name in carried._field_names:
            value = getattr(carried, name)
            fields[name] = map_submodules(
                lambda _, inner: self.ref(inner), value, _is_carried
            )
        state = carried._state
        tokens = state.transform_tokens
        if self._token is not None and carried is self._target:
            tokens |= {self._token}
        cls, name = type(carried), name_of(carried)
        if carried.scope is None:
            return _Spec(
                cls, fields, is_bound=False, name=name, transform_tokens=tokens
            )
        # A trace is valid for all modules that are equal in this, at any path.
        return _Spec(
            cls,
            fields,
            name=name,
            path=carried.scope.path if cls in PATH_READERS else None,
            in_compact=state.in_compact,
            place=state.place.name if state.place else None,
            counters=dict(state.counters),
            transform_tokens=tokens,
            own_names=state.own_names,
        )

    def refs(self, tree: PyTree) -> PyTree:
        """Returns a tree of arguments with refs in place of modules and variables."""
        if _is_carried(tree):
            return self.ref(tree)
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_carried)
        if not any(map(_is_carried, leaves)):
            return tree
        return structure.unflatten(
            [self.ref(x) if _is_carried(x) else x for x in leaves]
        )


def merge_modules(fn: Fn, index: int = 0, unpack: Unpack | None = None) -> Fn:
    """Converts a function of modules to one of a `ModuleState`, which was split at `index`.

    If given, `unpack` returns the positional and keyword arguments of `fn` for those of the result,
    which `weft.core.lift` then passes without wrappers.
    """

    def run(
        module_state: ModuleState, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        if unpack is not None:
            args, kwargs = unpack(*args)
        module_def, modules = module_state.module_def, module_state.modules()
        # A module of the closure replaces its inner one in `modules` during the call.
        inner_modules = list(modules)
        with _swapped_state(
            captured_modules(fn), module_def.captured[index], modules
        ):
            target, args, kwargs = jax.tree.map(
                lambda leaf: (
                    modules[leaf.index] if _is_module_ref(leaf) else leaf
                ),
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
            module_state.scopes[0].left_counts = _counts_of_submodules(modules)
        for module in inner_modules:
            if is_module(module) and module.scope is not None:
                module._end_scope()
        for leaf in jax.tree.leaves(result, is_leaf=is_module):
            if isinstance(leaf, Module | Scope | Variable):
                name = getattr(fn, "__name__", "the function")
                raise errors.TransformedMethodReturnValueError(
                    f"{type(first).__name__}: {name}"
                )
        return result

    run.__name__ = getattr(fn, "__name__", "run")
    if unpack is not None:
        run.takes_packed_args = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _counts_of_submodules(
    modules: Sequence[Carried],
) -> frozenset[tuple[tuple[int, str], int]]:
    """Returns how many submodules each module has named, by the module's index and a class name."""
    counts: list[tuple[tuple[int, str], int]] = []
    for index, module in enumerate(modules):
        if isinstance(module, Module):
            for class_name, count in module._state.counters.items():
                counts.append(((index, class_name), count))
    return frozenset(counts)


_CONTAINER_TYPES = (
    FunctionType,
    MethodType,
    functools.partial,
    list,
    tuple,
    dict,
)


def captured_modules(fn: PyTree) -> list[Module]:
    """Returns the bound modules that a function captures, directly or through other functions."""
    modules_by_id: dict[int, Module] = {}
    visited_ids: set[int] = set()
    pending = list(reversed(_references_of(fn)))
    while pending:
        value = pending.pop()
        if isinstance(value, Module):
            if value.scope is not None:
                modules_by_id[id(value)] = value
            continue
        has_references = isinstance(
            value, _CONTAINER_TYPES
        ) or struct.child_names(type(value))
        if has_references and id(value) not in visited_ids:
            visited_ids.add(id(value))
            pending.extend(reversed(_references_of(value)))
    return list(modules_by_id.values())


def _references_of(fn: PyTree) -> Sequence[Any]:
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
    closure_values: list[Any] = []
    for cell in fn.__closure__ or ():
        try:
            closure_values.append(cell.cell_contents)
        except ValueError:
            continue  # a name that has no value yet
    return *closure_values, fn.__defaults__, fn.__kwdefaults__


@contextlib.contextmanager
def _swapped_state(
    outer: Sequence[Module], refs: Sequence[ModuleRef], inner: list[Module]
) -> Iterator[None]:
    """Enters a context in which outer modules hold the state of the inner ones.

    A closure refers to the caller's module itself, which would use variables of the outer trace.
    """
    outer_attributes = [dict(vars(module)) for module in outer]
    for module, ref in zip(outer, refs, strict=True):
        _replace_attributes(module, vars(inner[ref.index]))
        inner[ref.index] = module
    try:
        yield
    finally:
        for module, attributes in zip(outer, outer_attributes, strict=True):
            _replace_attributes(module, attributes)


def _replace_attributes(module: Module, attributes: dict[str, Any]) -> None:
    attributes = dict(attributes)  # they may be those of the module itself
    vars(module).clear()
    vars(module).update(attributes)


def unbound(fn: Fn) -> Fn:
    """Returns the function of a module's bound method, to be called with the module inside."""
    return (
        fn.__func__
        if isinstance(fn, MethodType) and is_module(fn.__self__)
        else fn
    )


class SplitCall(NamedTuple):
    """Arguments of a lifted function, as they cross.

    Attributes:
        splitter: the modules outside, see `commit_counters`.
        args, kwargs: the other arguments, without those that belong to the structure.
    """

    splitter: ModuleSplitter
    module_state: ModuleState
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]


def split_modules(
    fns: Sequence[Fn],
    target: PyTree,
    args: tuple[PyTree, ...] = (),
    kwargs: Mapping[str, PyTree] = MappingProxyType({}),
    token: TransformToken | None = None,
) -> SplitCall:
    """Extracts the modules from the arguments of lifted functions.

    `token` marks the target as inside of a transformed class.
    """
    _check_target(fns[0], target)
    splitter = ModuleSplitter(target, token)
    target_refs = splitter.refs(target)
    args, kwargs = splitter.refs((args, dict(kwargs)))
    # All functions get the modules of all: branches must have the same arguments.
    captured = tuple(
        tuple(map(splitter.ref, captured_modules(fn))) for fn in fns
    )
    options: dict[str, Any] = {}
    arrays: dict[str, PyTree] = {}
    for name, value in kwargs.items():
        (options if _is_static_argument(value) else arrays)[name] = value
    module_def = ModuleDef(splitter.specs, target_refs, captured, options)
    return SplitCall(
        splitter, ModuleState(module_def, splitter.scopes), args, arrays
    )


def _is_static_argument(value: object) -> bool:
    """Returns whether an argument cannot be mapped or sliced, and thus belongs to the structure."""
    return value is None or isinstance(value, bool | str) or callable(value)


def _check_target(fn: Fn, target: PyTree) -> None:
    if is_module(target):
        return
    leaves = jax.tree.leaves(target, is_leaf=is_module) or [target]
    for leaf in leaves:
        if not is_module(leaf):
            name = getattr(fn, "__name__", "the function")
            raise errors.TransformArgumentError(
                f"{name} is transformed, and its first argument is {leaf!r} of type "
                f"{type(leaf).__name__}; expected a module or a tree of modules. Give the module "
                f"first, as {name}(self, ...)."
            )


def commit_counters(splitter: ModuleSplitter) -> None:
    """Updates the outer modules' numbers of named submodules after a lifted function."""
    counters_by_index: dict[int, dict[str, int]] = {}
    for (index, class_name), count in splitter.scopes[0].left_counts:
        counters_by_index.setdefault(index, {})[class_name] = count
    for index, counters in counters_by_index.items():
        splitter.modules[index]._state.update_counters(counters)


@contextlib.contextmanager
def lifted_call(
    fns: Sequence[Fn], target: PyTree, args: tuple[PyTree, ...]
) -> Iterator[tuple[ModuleState, tuple[PyTree, ...]]]:
    """Enters a context for the call of a lifted function, with its first and its other arguments.

    See `split_modules`.
    """
    call = split_modules(fns, target, args)
    yield call.module_state, call.args
    commit_counters(call.splitter)
