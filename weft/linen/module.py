"""Modules: dataclasses whose methods use variables.

An unbound module is a description, its fields. `init` and `apply` bind a copy to a scope for one
call, in which its methods create and use variables. Submodules are created in `setup`, which names
them by their attributes, or in a compact method, which names them by their classes. A child's scope
is below its parent's, so the variables form the same tree as the modules.

A module in a field of another module, directly or in lists, dicts and those fields of a
`struct.dataclass` that are children of its pytree, becomes its submodule when the other is bound,
named by the attribute and its place in the containers. The original remains unbound: its copy is
bound. A module in several places is one submodule, named by the first place. Within a container the
order is that of the names as text: the key "a" precedes "b", and the index 10 precedes 2.
"""

import contextlib
import dataclasses
import difflib
import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, dataclass_transform

from weft import core, errors, struct
from weft.core import FrozenDict, Scope, display, tracing
from weft.core.filters import Filter, union_filters
from weft.core.rngs import RngKeys
from weft.core.settings import settings
from weft.linen import methods, summary
from weft.linen import state as state_lib
from weft.linen.state import RUNNING


def map_submodules(
    fn: Callable[[str, Any], Any], value: Any, is_leaf: Callable[[Any], bool], at: str = ""
) -> Any:
    """Maps the modules in an attribute's value; lists become tuples, and dicts frozen dicts.

    Args:
        fn: maps the name of a module's place and the module to the replacement.
    """
    if is_leaf(value):
        return fn(at, value)
    if isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        items = _map_items(fn, zip(names, value, strict=True), is_leaf, at)
        if isinstance(value, tuple) and all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, Mapping) and isinstance(value, dict | FrozenDict):
        items = _map_items(fn, value.items(), is_leaf, at)
        return FrozenDict(zip(value, items, strict=True))
    names, holder = struct.child_names(type(value)), cast(Any, value)
    before = [getattr(value, name) for name in names]
    items = _map_items(fn, zip(names, before, strict=True), is_leaf, at)
    changed = {n: a for n, a, b in zip(names, items, before, strict=True) if a is not b}
    return holder.replace(**changed) if changed else value


def _map_items(
    fn: Callable[[str, "Module"], Any],
    items: Iterable[tuple[Any, Any]],
    is_leaf: Callable[[Any], bool],
    at: str,
) -> list[Any]:
    """Maps a container's values in the order of their names; returns them in their own."""
    named = [(f"{at}_{name}", value) for name, value in items]
    mapped: list[Any] = [None] * len(named)
    for i in sorted(range(len(named)), key=lambda i: named[i][0]):
        mapped[i] = map_submodules(fn, named[i][1], is_leaf, named[i][0])
    return mapped


def module_repr(module: state_lib.ModuleVariables, step: str = "    ") -> str:
    """Returns the text of a module, as in Flax, each level indented by `step`."""
    held = vars(module)
    fields = [f.name for f in dataclasses.fields(cast(Any, module)) if f.repr and f.name in held]
    children = module._state.children if "_state" in held else {}
    names = {name for name in fields if name not in ("parent", "name")}
    lines = []
    if shown := [(n, held[n]) for n in fields if n in names and n not in children]:
        lines.append("# attributes")
        lines += [f"{name} = {_shown(value, step)}" for name, value in shown]
    if children:
        lines.append("# children")
        lines += [f"{name} = {module_repr(child, step)}" for name, child in children.items()]
    if not lines:
        return f"{type(module).__name__}()"
    inner = "\n".join(step + line for line in "\n".join(lines).split("\n"))
    return f"{type(module).__name__}(\n{inner}\n)"


def _own_variables(
    module: state_lib.ModuleVariables, children: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Returns by collection the variables of a bound module, without those of known children."""
    scope = vars(module).get("scope")
    found = {} if scope is None else scope.variables()
    own = {col: {k: v for k, v in tree.items() if k not in children} for col, tree in found.items()}
    return {col: tree for col, tree in own.items() if tree}


def _shown(value: object, step: str) -> str:
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    if dataclasses.is_dataclass(value) and hasattr(value, "_state"):
        return module_repr(value, step)  # pyright: ignore[reportArgumentType]
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return repr(dict(value))
    return repr(value)


M = TypeVar("M", bound="Module")


class CurrentModule(enum.Enum):
    """Default of `parent`: the module whose method runs, None outside of methods."""

    MODULE = enum.auto()

    def __repr__(self) -> str:
        return "<the module that runs>"


@dataclass_transform(field_specifiers=(dataclasses.field,))
@dataclasses.dataclass(repr=False)
class Module(state_lib.ModuleVariables):
    """Base class of all modules; each subclass is a dataclass of its annotated fields.

    Attributes:
        parent: the parent module, by default the one whose method runs; None for a root module.
        name: name in the parent, by default from the attribute or the class.

    Raises:
        AssignSubModuleError: if created in a method that is neither `setup` nor compact.
        NameInUseError: if the name is taken in the parent.

    >>> class Autoencoder(nn.Module):
    ...     features: int
    ...     def setup(self):
    ...         self.encoder = nn.Dense(self.features)
    ...         self.decoder = nn.Dense(3)
    ...     def __call__(self, x):
    ...         return self.decoder(nn.relu(self.encoder(x)))
    >>> model, x = Autoencoder(features=2), jnp.ones((5, 3))
    >>> model.apply(model.init(jax.random.key(0), x), x).shape
    (5, 3)
    """

    parent: "Module | Scope | CurrentModule | None" = dataclasses.field(
        default=CurrentModule.MODULE, kw_only=True, repr=False, compare=False
    )
    name: str | None = dataclasses.field(default=None, kw_only=True)

    if TYPE_CHECKING:
        __call__: ClassVar[Callable[..., Any]]

    _field_names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, kw_only: bool = False, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        own = inspect.get_annotations(cls)
        if taken := {name: own[name] for name in ("parent", "name") if name in own}:
            raise errors.ReservedModuleAttributeError(taken)
        has_hash = "__hash__" in vars(cls)
        dataclasses.dataclass(repr=False, kw_only=kw_only)(cls)
        if not has_hash:
            cls.__hash__ = _hash
        fields = dataclasses.fields(cls)
        methods.wrap_methods(cls, {f.name for f in fields})
        init = [f.name for f in fields if f.init]
        cls._field_names = tuple(name for name in init if name not in ("parent", "name"))

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "_state", state_lib.State())
        set_(self, "scope", None)
        parent = self.parent
        if parent is CurrentModule.MODULE:
            parent = state_lib.current_module()
            set_(self, "parent", parent)
        if isinstance(parent, Scope):
            self._state.adopted = {}
            self._bind(parent)
        elif isinstance(parent, Module):
            parent._adopt_fields(self)
        elif parent is not None:
            raise errors.InvalidParentModuleError(type(self).__name__, parent)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_parent_ref" in state:  # pickled by Flax
            init = {f.name for f in dataclasses.fields(self) if f.init}
            self.__init__(**{name: state[name] for name in init & state.keys()}, parent=None)
        else:
            vars(self).update(state)

    # The tree.

    def setup(self) -> None:
        """Creates submodules and variables as attributes; runs before the first method."""

    def _adopt_fields(self, child: "Module") -> None:
        """Attaches a submodule created in one of this module's methods."""
        state = self._state
        if state.in_setup and state_lib.name_of(child) is None:
            return  # the attribute that it is assigned to names it
        if not (state.in_setup or state.names_submodules):
            raise errors.AssignSubModuleError(type(child).__name__, self._shown)
        self._attach(child, state_lib.name_of(child) or state.next_name(type(child).__name__))

    def _attach(self, child: "Module", name: str) -> None:
        scope: Any = self._state.place or self.scope
        self._state.take(scope, name, self, child)
        object.__setattr__(child, "name", name)
        object.__setattr__(child, "parent", self)
        child._state.adopted = self._state.adopted
        child._bind(scope.push(name))

    def _bind(self, scope: Scope) -> None:
        object.__setattr__(self, "scope", scope)
        held = vars(self)
        for name in self._field_names:
            value = held.get(name)
            if _may_hold_modules(type(value)):
                adopted = map_submodules(self._adopt, value, is_module, name)
                if adopted is not value:
                    self._state.given = {**self._state.given, name: value}
                    object.__setattr__(self, name, adopted)

    def _rebind(self, scope: Any) -> None:
        object.__setattr__(self, "scope", scope)
        for name, child in self._state.children.items():
            child._rebind(scope.push(name))

    def _end_scope(self) -> None:
        """Breaks the reference cycles of a tree that is no longer used, to release its traces."""
        for child in self._state.children.values():
            if child.parent is self:
                child._end_scope()
                vars(child)["parent"] = None
        self._state.adopted.clear()

    def _adopt(self, name: str, module: "Module") -> "Module":
        """Returns a module in an attribute, as a submodule of this one if it has no parent yet."""
        if module.scope is not None:
            return module
        adopted = self._state.adopted
        if id(module) not in adopted:
            is_new = isinstance(module.parent, Module)  # made in a `setup` that runs
            adopted[id(module)] = module, module if is_new else module.clone()
            # `getattr` of the module itself would run its `setup`.
            default = getattr(type(self), _KEEPS_NAMES, settings.preserve_adopted_names)
            keep = vars(self).get(_KEEPS_NAMES, default)
            self._attach(adopted[id(module)][1], (keep and state_lib.name_of(module)) or name)
        return adopted[id(module)][1]

    def _run_setup(self) -> None:
        state = self._state
        scope: Any = self.scope
        if type(self).setup is not Module.setup:
            state.setup = state_lib.SetupProgress.RUNS
            RUNNING.module_stack.append(self)
            scope.free_names(state.own_names)
            try:
                self.setup()
            except BaseException:
                state.setup = state_lib.SetupProgress.DUE
                raise
            finally:
                RUNNING.module_stack.pop()
                scope.take_names(state.own_names)
        state.setup = state_lib.SetupProgress.DONE
        if not state.own_names and (names := scope.names()):
            state.own_names = names

    # Attributes.

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("scope") is None:
            object.__setattr__(self, name, value)
            return
        if not self._state.in_setup:
            raise errors.SetAttributeFrozenModuleError(self._shown, name, value)
        if name in self._field_names or name in ("parent", "name"):
            raise errors.SetAttributeInModuleSetupError(self._shown, name)
        object.__setattr__(self, name, map_submodules(self._adopt, value, is_module, name))

    def __delattr__(self, name: str) -> None:
        if self.__dict__.get("scope") is not None:
            raise errors.SetAttributeFrozenModuleError(self._shown, name, "(deleted)")
        object.__delattr__(self, name)

    def __getattr__(self, name: str) -> Any:
        cls = type(self)
        if name.startswith("__") or (
            name not in ("_state", "scope") and "_state" not in vars(self)
        ):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}.")
        if "_state" not in vars(self):
            raise errors.IncorrectPostInitOverrideError(cls.__name__)
        if inspect.isdatadescriptor(inspect.getattr_static(cls, name, None)):
            raise errors.DescriptorAttributeError(self._shown, name)
        if self.scope is not None and self._state.setup_is_due:
            self._run_setup()
            if name in vars(self):
                return vars(self)[name]
        near = difflib.get_close_matches(name, [*vars(self), *dir(cls)], n=1, cutoff=0.75)
        raise errors.ModuleAttributeError(
            self._shown, name, f"; did you mean {near[0]!r}?" if near else ""
        )

    def __dir__(self) -> Iterable[str]:
        if self.scope is not None and self._state.setup_is_due:
            self._run_setup()
        return super().__dir__()

    def __repr__(self) -> str:
        return module_repr(self)

    _repr_mimebundle_ = display.notebook_tree

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """Shows fields, variables and submodules, also those of `setup`, in Treescope's trees."""
        module = self
        with contextlib.suppress(Exception):  # `setup` may need inputs, or be wrong
            module = self.bind({}) if self.scope is None else self
            if module._state.setup_is_due:
                module._run_setup()
        held, children = vars(module), module._state.children
        fields = {name: held[name] for name in self._field_names if name not in children}
        shown = fields | _own_variables(module, children) | children
        return display.render_tree(self, shown, path, subtree_renderer)

    # Copies.

    def clone(
        self: M,
        *,
        parent: "Module | Scope | None" = None,
        _deep_clone: "bool | dict[int, Module]" = False,
        _reset_names: bool = False,
        **updates: object,
    ) -> M:
        """Returns an unbound copy.

        Args:
            _deep_clone: whether to copy submodules in the fields, each once; or a dict of such
                copies by the identity of the originals.

        >>> nn.Dense(3).clone(features=4).features
        4
        """
        given = self._state.given
        fields = {name: given.get(name, getattr(self, name)) for name in self._field_names}
        if _deep_clone is not False:
            copies = {} if _deep_clone is True else _deep_clone
            copied = functools.partial(_deep_copy, copies=copies, reset_names=_reset_names)
            fields = {n: map_submodules(copied, v, is_module) for n, v in fields.items()}
        name = None if _reset_names else state_lib.name_of(self)
        return type(self)(**{**fields, "parent": parent, "name": name, **updates})

    def copy(
        self: M,
        *,
        parent: "Module | CurrentModule | None" = CurrentModule.MODULE,
        name: str | None = None,
        **updates: object,
    ) -> M:
        """Returns a copy with its own name and fields `updates`, a child of the running module."""
        return self.clone(parent=parent, name=name, **updates)  # pyright: ignore[reportArgumentType]

    # Entry points.

    def bind(
        self: M,
        variables: Mapping[str, Any],
        *args: object,
        rngs: RngKeys = None,
        mutable: Filter = False,
    ) -> M:
        """Returns a copy with variables, for use outside of `apply`.

        The arguments are those of `apply`; `args` are ignored.

        >>> bound = nn.Dense(2).bind({"params": {"kernel": jnp.eye(2), "bias": jnp.ones(2)}})
        >>> bound(jnp.array([1.0, 2.0])).tolist()
        [2.0, 3.0]
        """
        _check_instance(self, "bind")
        return self._with_scope(core.bind(variables, rngs=rngs, mutable=mutable))

    def unbind(self: M) -> tuple[M, dict[str, Any]]:
        """Returns an unbound copy and the variables; inverts `bind`."""
        if self.scope is None:
            raise errors.CallUnbindOnUnboundModuleError(type(self).__name__)
        return self.clone(_deep_clone=True, _reset_names=True), self.variables

    @tracing.entry_point
    def apply(
        self,
        variables: Mapping[str, Any],
        *args: object,
        rngs: RngKeys = None,
        method: "str | Callable[..., Any] | None" = None,
        mutable: Filter = False,
        capture_intermediates: "bool | Callable[[Module, str], bool]" = False,
        **kwargs: object,
    ) -> Any:
        """Calls a method with variables.

        Args:
            variables: the collections, as created by `init`.
            rngs: a key, or keys by stream name.
            method: a method, its name, or a function of the module; by default `__call__`.
            mutable: collections that can be changed; they are also returned.
            capture_intermediates: whether to store the results of all `__call__` methods in the
                collection `intermediates`; or a function of module and method name to select them.

        Returns the result; unless `mutable` is False, in a pair with the mutable collections.

        Raises:
            ApplyModuleInvalidMethodError: if `method` is not a method.
            ModifyScopeVariableError: if the method writes to an immutable collection.
        """
        run, mutable, flags = Module._runner(self, "apply", method, mutable, capture_intermediates)
        return core.apply(run, mutable, flags)(variables, *args, rngs=rngs, **kwargs)

    @tracing.entry_point
    def init_with_output(
        self,
        rngs: RngKeys,
        *args: object,
        method: "str | Callable[..., Any] | None" = None,
        mutable: Filter = state_lib.ALL_BUT_INTERMEDIATES,
        capture_intermediates: "bool | Callable[[Module, str], bool]" = False,
        **kwargs: object,
    ) -> tuple[Any, dict[str, Any]]:
        """Returns a method's result and the variables that it creates; see `init`."""
        run, mutable, flags = Module._runner(
            self, "init_with_output", method, mutable, capture_intermediates
        )
        return core.init(run, mutable, flags)(rngs, *args, **kwargs)

    @tracing.entry_point
    def init(
        self,
        rngs: RngKeys,
        *args: object,
        method: "str | Callable[..., Any] | None" = None,
        mutable: Filter = state_lib.ALL_BUT_INTERMEDIATES,
        capture_intermediates: "bool | Callable[[Module, str], bool]" = False,
        **kwargs: object,
    ) -> dict[str, Any]:
        """Returns the variables that a method creates.

        Args:
            rngs: a key for the stream `params`, or keys by stream name.
            method, capture_intermediates: see `apply`.

        >>> variables = nn.Dense(2).init(jax.random.key(0), jnp.ones((1, 3)))
        >>> jax.tree.map(jnp.shape, variables)
        {'params': {'bias': (2,), 'kernel': (3, 2)}}
        """
        run, mutable, flags = Module._runner(self, "init", method, mutable, capture_intermediates)
        return core.init(run, mutable, flags)(rngs, *args, **kwargs)[1]

    def lazy_init(
        self,
        rngs: RngKeys,
        *args: object,
        method: "str | Callable[..., Any] | None" = None,
        mutable: Filter = state_lib.ALL_BUT_INTERMEDIATES,
        **kwargs: object,
    ) -> dict[str, Any]:
        """Returns the variables of `init` without other computations, for arrays or their shapes.

        Raises LazyInitError if an initial value depends on an input given only as a shape.
        """
        run, mutable, flags = Module._runner(self, "lazy_init", method, mutable, False)
        return core.lazy_init(run, mutable, flags)(rngs, *args, **kwargs)

    def _runner(
        self,
        what: str,
        method: "str | Callable[..., Any] | None",
        mutable: Filter,
        capture: "bool | Callable[[Module, str], bool]",
    ) -> tuple[Callable[..., Any], Filter, dict[str, Any]]:
        _check_instance(self, what)
        _ = self._state  # refuses what was not made whole
        call = self._method(method)
        flags = {"capture": capture} if capture else {}
        if capture:
            mutable = union_filters(mutable, "intermediates")

        def run(scope: Scope, *args: object, **kwargs: object) -> Any:
            module = self._with_scope(scope)
            try:
                with state_lib.without_parent():
                    return call(module, *args, **kwargs)
            finally:
                module._end_scope()

        return run, mutable, flags

    def _with_scope(self: M, scope: Scope) -> M:
        """Returns a copy on another tree of variables, without submodules bound elsewhere."""
        return self.clone(parent=scope, _deep_clone=_has_bound_submodule(self))

    def _method(self, method: "str | Callable[..., Any] | None") -> Callable[..., Any]:
        if method is None:
            method = "__call__"
        if isinstance(method, str):
            if method == "__call__" and not callable(self):
                raise errors.ModuleAttributeError(type(self).__name__, "__call__", ": define it")
            if not callable(vars(self).get(method, callable)):
                raise errors.ApplyModuleInvalidMethodError(method)
            return lambda module, *args, **kwargs: getattr(module, method)(*args, **kwargs)
        if isinstance(method, types.MethodType) and isinstance(method.__self__, Module):
            return method.__func__
        code = getattr(method, "__code__", None)
        takes_nothing = code and not (code.co_argcount or code.co_flags & inspect.CO_VARARGS)
        if not callable(method) or takes_nothing:
            raise errors.ApplyModuleInvalidMethodError(method)
        return method

    def module_paths(
        self,
        rngs: RngKeys,
        *args: object,
        show_repeated: bool = False,
        mutable: Filter = state_lib.ALL_BUT_INTERMEDIATES,
        **kwargs: object,
    ) -> "dict[str, Module]":
        """Returns unbound copies of the modules that `init` uses, by path.

        With `show_repeated`, a module that is called again counts again.
        """
        calls, _ = summary.record_calls(self, rngs, args, kwargs, mutable, show_repeated)
        return {"/".join(call.path): summary.without_transforms(call.module) for call in calls}

    def tabulate(
        self,
        rngs: RngKeys,
        *args: object,
        depth: int | None = None,
        show_repeated: bool = False,
        mutable: Filter = state_lib.ALL_BUT_INTERMEDIATES,
        console_kwargs: Mapping[str, Any] | None = None,
        table_kwargs: Mapping[str, Any] = {},
        column_kwargs: Mapping[str, Any] = {},
        compute_flops: bool = False,
        compute_vjp_flops: bool = False,
        **kwargs: object,
    ) -> str:
        """Returns a table of a call's modules, inputs and outputs; see `weft.linen.tabulate`."""
        of_rich = console_kwargs, table_kwargs, column_kwargs
        options = depth, show_repeated, mutable, *of_rich, compute_flops, compute_vjp_flops
        return summary.tabulate(self, rngs, *options, **kwargs)(*args)


@functools.lru_cache(maxsize=1024)
def _may_hold_modules(cls: type) -> bool:
    holders = Module, list, tuple, dict, FrozenDict
    return issubclass(cls, holders) or hasattr(cls, "_weft_struct")


_KEEPS_NAMES = "preserve_adopted_names"


def _check_instance(x: object, method: str) -> None:
    if not isinstance(x, Module):
        raise errors.InvalidInstanceModuleError("Module", method)


def _deep_copy(_: str, module: Module, copies: dict[int, Module], reset_names: bool) -> Module:
    if id(module) not in copies:
        copies[id(module)] = module.clone(_deep_clone=copies, _reset_names=reset_names)
    return copies[id(module)]


def _has_bound_submodule(value: Any) -> bool:
    if isinstance(value, Module):
        below = [vars(value).get(name) for name in value._field_names]
    elif isinstance(value, list | tuple):
        below = value
    elif isinstance(value, dict) or FrozenDict in type(value).__mro__:
        below = value.values()
    else:
        return False
    return any(
        (isinstance(x, Module) and x.scope is not None) or _has_bound_submodule(x) for x in below
    )


def is_module(x: object) -> bool:
    """Returns whether `x` is a module."""
    return isinstance(x, Module)


def _hash(self: Module) -> int:
    if self.scope is not None:
        # JAX reuses a trace for an equal function, but it contains the first one's variables.
        raise TypeError(
            f"{self._shown} is bound to variables, so it has no hash, and `jax.jit`, "
            "`jax.checkpoint` or `jax.lax.cond` cannot take the module itself as the function. "
            "Use `nn.jit`, `nn.remat` or `nn.cond` of weft.linen, or a function that calls it: "
            "`lambda x: module(x)`."
        )
    try:
        return hash(
            (
                type(self),
                state_lib.name_of(self),
                *(getattr(self, name) for name in self._field_names),
            )
        )
    except TypeError as error:
        raise TypeError(f"{self!r} has no hash: one of its fields has none ({error}).") from error


# `typing.get_type_hints` of a subclass's `__init__` looks for names where the subclass is defined.
Module.__dataclass_fields__["parent"].type = Module | Scope | CurrentModule | None
Module.__hash__ = _hash
Module.name = state_lib.NameField()  # pyright: ignore[reportAttributeAccessIssue]
