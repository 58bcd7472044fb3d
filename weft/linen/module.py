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
import operator
import types
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Mapping,
)
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    overload,
)

from weft import core, errors, struct
from weft.core import FrozenDict, Scope, display, tracing
from weft.core.filters import DenyList, Filter, union_filters
from weft.core.rngs import RngKeys
from weft.core.settings import settings
from weft.linen import methods, summary
from weft.linen import state as state_lib
from weft.linen.state import RUNNING
from weft.typing import PyTree, T

Capture = Union[bool, Callable[["Module", str], bool]]  # noqa: UP007 - Module refers to it
# Filters with which a call returns the collections that it changed.
MutableNames = Literal[True] | str | Collection[str] | DenyList


def map_submodules(
    fn: Callable[[str, Any], Any],
    value: Any,
    is_leaf: Callable[[Any], bool],
    name: str = "",
) -> Any:
    """Maps the modules in an attribute's value; lists become tuples, and dicts frozen dicts.

    Args:
        fn: maps the name of a module's place and the module to the replacement.
        name: the name of the value's own place.
    """
    if is_leaf(value):
        return fn(name, value)
    if isinstance(value, tuple | list):
        item_names = getattr(value, "_fields", range(len(value)))
        items = _map_items(fn, item_names, value, is_leaf, name)
        is_namedtuple = hasattr(value, "_fields")
        if isinstance(value, tuple) and all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if is_namedtuple else tuple(items)
    if isinstance(value, dict | FrozenDict):
        items = _map_items(fn, value, value.values(), is_leaf, name)
        return FrozenDict(zip(value, items, strict=True))
    child_names = struct.child_names(type(value))
    children = [getattr(value, child_name) for child_name in child_names]
    changed: dict[str, Any] = {}
    new_children = _map_items(fn, child_names, children, is_leaf, name)
    for child_name, child, new_child in zip(
        child_names, children, new_children, strict=True
    ):
        if new_child is not child:
            changed[child_name] = new_child
    return value.replace(**changed) if changed else value


def _map_items(
    fn: Callable[[str, Any], Any],
    item_names: Iterable[Hashable],
    items: Iterable[Any],
    is_leaf: Callable[[Any], bool],
    container_name: str,
) -> list[Any]:
    """Maps a container's values in the order of their names; returns them in their own."""
    names = [f"{container_name}_{item_name}" for item_name in item_names]
    mapped = list(items)
    for i in sorted(range(len(names)), key=names.__getitem__):
        mapped[i] = map_submodules(fn, mapped[i], is_leaf, names[i])
    return mapped


def module_repr(module: state_lib.ModuleVariables, step: str = "    ") -> str:
    """Returns the text of a module, as in Flax, each level indented by `step`."""
    attributes = vars(module)
    children = module._state.children if "_state" in attributes else {}
    attribute_lines: list[str] = []
    for field in dataclasses.fields(cast(Any, module)):
        is_shown = field.repr and field.name not in ("parent", "name")
        if is_shown and field.name in attributes and field.name not in children:
            attribute_lines.append(
                f"{field.name} = {_text_of_value(attributes[field.name], step)}"
            )
    child_lines = [
        f"{name} = {module_repr(child, step)}"
        for name, child in children.items()
    ]
    lines: list[str] = []
    if attribute_lines:
        lines += ["# attributes", *attribute_lines]
    if child_lines:
        lines += ["# children", *child_lines]
    if not lines:
        return f"{type(module).__name__}()"
    body = "\n".join(lines).replace("\n", f"\n{step}")
    return f"{type(module).__name__}(\n{step}{body}\n)"


def _variables_without_children(
    module: state_lib.ModuleVariables, children: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Returns by collection the variables of a bound module, without those of known children."""
    scope = vars(module).get("scope")
    if scope is None:
        return {}
    variables: dict[str, dict[str, Any]] = {}
    for collection, entries in scope.variables().items():
        remaining = {
            name: value
            for name, value in entries.items()
            if name not in children
        }
        if remaining:
            variables[collection] = remaining
    return variables


def _text_of_value(value: object, step: str) -> str:
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
        annotations = inspect.get_annotations(cls)
        reserved = {
            name: annotations[name]
            for name in ("parent", "name")
            if name in annotations
        }
        if reserved:
            raise errors.ReservedModuleAttributeError(reserved)
        has_hash = "__hash__" in vars(cls)
        dataclasses.dataclass(repr=False, kw_only=kw_only)(cls)
        if not has_hash:
            cls.__hash__ = _hash
        fields = dataclasses.fields(cls)
        methods.wrap_methods(cls, {field.name for field in fields})
        field_names: list[str] = []
        for field in fields:
            if field.init and field.name not in ("parent", "name"):
                field_names.append(field.name)
        cls._field_names = tuple(field_names)

    def __post_init__(self) -> None:
        # `__setattr__` of the class itself reads what is set here.
        object.__setattr__(self, "_state", state_lib.State())
        object.__setattr__(self, "scope", None)
        parent = self.parent
        if parent is CurrentModule.MODULE:
            parent = state_lib.current_module()
            object.__setattr__(self, "parent", parent)
        if isinstance(parent, Scope):
            self._state.adopted = {}
            self._bind(parent)
        elif isinstance(parent, Module):
            parent._attach_created(self)
        elif parent is not None:
            raise errors.InvalidParentModuleError(type(self).__name__, parent)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_parent_ref" not in state:
            vars(self).update(state)
            return
        # Pickled by Flax, whose modules hold more than their fields.
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            if field.init and field.name in state:
                fields[field.name] = state[field.name]
        self.__init__(**{**fields, "parent": None})

    # The tree.

    def setup(self) -> None:
        """Creates submodules and variables as attributes; runs before the first method."""

    def _attach_created(self, child: "Module") -> None:
        """Attaches a submodule created in one of this module's methods."""
        state, name = self._state, state_lib.name_of(child)
        if state.in_setup and name is None:
            return  # the attribute that it is assigned to names it
        if not (state.in_setup or state.names_submodules):
            raise errors.AssignSubModuleError(
                type(child).__name__, self._name_in_errors
            )
        self._attach(child, name or state.next_name(type(child).__name__))

    def _attach(self, child: "Module", name: str) -> None:
        scope: Any = self._state.place or self.scope
        self._state.add_child(scope, name, self, child)
        object.__setattr__(child, "name", name)
        object.__setattr__(child, "parent", self)
        # One table for the whole tree, so that a module in several places is one submodule.
        child._state.adopted = self._state.adopted
        child._bind(scope.push(name))

    def _bind(self, scope: Scope) -> None:
        object.__setattr__(self, "scope", scope)
        attributes = vars(self)
        for name in self._field_names:
            value = attributes.get(name)
            if _may_hold_modules(type(value)):
                adopted = map_submodules(self._adopt, value, is_module, name)
                if adopted is not value:
                    original_fields = self._state.original_fields
                    self._state.original_fields = {
                        **original_fields,
                        name: value,
                    }
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
        if id(module) in adopted:
            return adopted[id(module)][1]
        is_created_in_setup = isinstance(
            module.parent, Module
        )  # of a `setup` that runs
        submodule = module if is_created_in_setup else module.clone()
        adopted[id(module)] = module, submodule
        # `getattr` of the module itself would run its `setup`.
        class_default = getattr(
            type(self), _KEEPS_NAMES, settings.preserve_adopted_names
        )
        if vars(self).get(_KEEPS_NAMES, class_default):
            name = state_lib.name_of(module) or name
        self._attach(submodule, name)
        return submodule

    def _run_setup(self) -> None:
        state = self._state
        scope: Any = self.scope
        if type(self).setup is not Module.setup:
            state.setup = state_lib.SetupProgress.RUNS
            RUNNING.module_stack.append(self)
            # A module that has crossed a transformation takes its names again.
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
            raise errors.SetAttributeFrozenModuleError(
                self._name_in_errors, name, value
            )
        if name in self._field_names or name in ("parent", "name"):
            raise errors.SetAttributeInModuleSetupError(
                self._name_in_errors, name
            )
        object.__setattr__(
            self, name, map_submodules(self._adopt, value, is_module, name)
        )

    def __delattr__(self, name: str) -> None:
        if self.__dict__.get("scope") is not None:
            raise errors.SetAttributeFrozenModuleError(
                self._name_in_errors, name, "(deleted)"
            )
        object.__delattr__(self, name)

    def __getattr__(self, name: str) -> Any:
        cls = type(self)
        has_state = "_state" in vars(self)
        if name.startswith("__") or (
            not has_state and name not in ("_state", "scope")
        ):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}.")
        if not has_state:
            raise errors.IncorrectPostInitOverrideError(cls.__name__)
        if inspect.isdatadescriptor(inspect.getattr_static(cls, name, None)):
            # The property raised an AttributeError itself.
            raise errors.DescriptorAttributeError(self._name_in_errors, name)
        if self.scope is not None and self._state.setup_is_due:
            self._run_setup()
            if name in vars(self):
                return vars(self)[name]
        near_names = difflib.get_close_matches(
            name, [*vars(self), *dir(cls)], n=1, cutoff=0.75
        )
        hint = f"; did you mean {near_names[0]!r}?" if near_names else ""
        raise errors.ModuleAttributeError(self._name_in_errors, name, hint)

    def __dir__(self) -> Iterable[str]:
        if self.scope is not None and self._state.setup_is_due:
            self._run_setup()
        return super().__dir__()

    def __repr__(self) -> str:
        return module_repr(self)

    _repr_mimebundle_ = display.notebook_tree

    def __treescope_repr__(
        self, path: str | None, subtree_renderer: Callable[..., object]
    ) -> Any:
        """Shows fields, variables and submodules, also those of `setup`, in Treescope's trees."""
        module = self
        with contextlib.suppress(
            Exception
        ):  # `setup` may need inputs, or be wrong
            module = self.bind({}) if self.scope is None else self
            if module._state.setup_is_due:
                module._run_setup()
        children = module._state.children
        shown: dict[str, Any] = {}
        for name in self._field_names:
            if name not in children:
                shown[name] = vars(module)[name]
        shown |= _variables_without_children(module, children)
        shown |= children
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
        fields = {name: getattr(self, name) for name in self._field_names}
        fields |= self._state.original_fields
        if _deep_clone is not False:
            copies = {} if _deep_clone is True else _deep_clone
            copy = functools.partial(
                _deep_copy, copies=copies, reset_names=_reset_names
            )
            for name, value in fields.items():
                fields[name] = map_submodules(copy, value, is_module)
        own_name = None if _reset_names else state_lib.name_of(self)
        return type(self)(
            **{**fields, "parent": parent, "name": own_name, **updates}
        )

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
        *args: PyTree,
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
        return self._with_scope(
            core.bind(variables, rngs=rngs, mutable=mutable)
        )

    def unbind(self: M) -> tuple[M, dict[str, Any]]:
        """Returns an unbound copy and the variables; inverts `bind`."""
        if self.scope is None:
            raise errors.CallUnbindOnUnboundModuleError(type(self).__name__)
        return self.clone(_deep_clone=True, _reset_names=True), self.variables

    @overload
    def apply(
        self: Callable[..., T],
        variables: Mapping[str, Any],
        *args: PyTree,
        rngs: RngKeys = ...,
        method: None = ...,
        mutable: Literal[False] = ...,
        capture_intermediates: Capture = ...,
        **kwargs: PyTree,
    ) -> T: ...
    @overload
    def apply(
        self: Callable[..., T],
        variables: Mapping[str, Any],
        *args: PyTree,
        rngs: RngKeys = ...,
        method: None = ...,
        mutable: MutableNames,
        capture_intermediates: Capture = ...,
        **kwargs: PyTree,
    ) -> tuple[T, dict[str, Any]]: ...
    @overload
    def apply(
        self,
        variables: Mapping[str, Any],
        *args: PyTree,
        rngs: RngKeys = ...,
        method: Callable[..., T],
        mutable: Literal[False] = ...,
        capture_intermediates: Capture = ...,
        **kwargs: PyTree,
    ) -> T: ...
    @overload
    def apply(
        self,
        variables: Mapping[str, Any],
        *args: PyTree,
        rngs: RngKeys = ...,
        method: Callable[..., T],
        mutable: MutableNames,
        capture_intermediates: Capture = ...,
        **kwargs: PyTree,
    ) -> tuple[T, dict[str, Any]]: ...
    @overload
    def apply(
        self,
        variables: Mapping[str, Any],
        *args: PyTree,
        rngs: RngKeys = ...,
        method: str | Callable[..., Any] | None = ...,
        mutable: Filter = ...,
        capture_intermediates: Capture = ...,
        **kwargs: PyTree,
    ) -> Any: ...
    @tracing.entry_point
    def apply(
        self,
        variables: Mapping[str, Any],
        *args: PyTree,
        rngs: RngKeys = None,
        method: "str | Callable[..., Any] | None" = None,
        mutable: Filter = False,
        capture_intermediates: Capture = False,
        **kwargs: PyTree,
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
        run, mutable, flags = Module._runner(
            self, "apply", method, mutable, capture_intermediates
        )
        return core.apply(run, mutable, flags)(
            variables, *args, rngs=rngs, **kwargs
        )

    @overload
    def init_with_output(
        self: Callable[..., T],
        rngs: RngKeys,
        *args: PyTree,
        method: None = ...,
        mutable: Filter = ...,
        capture_intermediates: Capture = ...,
        **kwargs: PyTree,
    ) -> tuple[T, dict[str, Any]]: ...
    @overload
    def init_with_output(
        self,
        rngs: RngKeys,
        *args: PyTree,
        method: Callable[..., T],
        mutable: Filter = ...,
        capture_intermediates: Capture = ...,
        **kwargs: PyTree,
    ) -> tuple[T, dict[str, Any]]: ...
    @overload
    def init_with_output(
        self,
        rngs: RngKeys,
        *args: PyTree,
        method: str,
        mutable: Filter = ...,
        capture_intermediates: Capture = ...,
        **kwargs: PyTree,
    ) -> tuple[Any, dict[str, Any]]: ...
    @tracing.entry_point
    def init_with_output(
        self,
        rngs: RngKeys,
        *args: PyTree,
        method: "str | Callable[..., Any] | None" = None,
        mutable: Filter = state_lib.ALL_BUT_INTERMEDIATES,
        capture_intermediates: Capture = False,
        **kwargs: PyTree,
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
        *args: PyTree,
        method: "str | Callable[..., Any] | None" = None,
        mutable: Filter = state_lib.ALL_BUT_INTERMEDIATES,
        capture_intermediates: Capture = False,
        **kwargs: PyTree,
    ) -> dict[str, Any]:
        """Returns the variables that a method creates.

        Args:
            rngs: a key for the stream `params`, or keys by stream name.
            method, capture_intermediates: see `apply`.

        >>> variables = nn.Dense(2).init(jax.random.key(0), jnp.ones((1, 3)))
        >>> jax.tree.map(jnp.shape, variables)
        {'params': {'bias': (2,), 'kernel': (3, 2)}}
        """
        run, mutable, flags = Module._runner(
            self, "init", method, mutable, capture_intermediates
        )
        return core.init(run, mutable, flags)(rngs, *args, **kwargs)[1]

    def lazy_init(
        self,
        rngs: RngKeys,
        *args: PyTree,
        method: "str | Callable[..., Any] | None" = None,
        mutable: Filter = state_lib.ALL_BUT_INTERMEDIATES,
        **kwargs: PyTree,
    ) -> dict[str, Any]:
        """Returns the variables of `init` without other computations, for arrays or their shapes.

        Raises LazyInitError if an initial value depends on an input given only as a shape.
        """
        run, mutable, flags = Module._runner(
            self, "lazy_init", method, mutable, False
        )
        return core.lazy_init(run, mutable, flags)(rngs, *args, **kwargs)

    def _runner(
        self,
        entry_point: str,
        method: "str | Callable[..., T] | None",
        mutable: Filter,
        capture: "bool | Callable[[Module, str], bool]",
    ) -> tuple[Callable[..., T], Filter, dict[str, Any]]:
        """Returns a function of a scope that calls a method, with what may change and its flags."""
        _check_instance(self, entry_point)
        _ = self._state  # raises an error if `__post_init__` was not called
        call = self._method(method)
        flags: dict[str, Any] = {}
        if capture:
            flags["capture"] = capture
            mutable = union_filters(mutable, "intermediates")

        def run(scope: Scope, *args: PyTree, **kwargs: PyTree) -> T:
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

    def _method(
        self, method: "str | Callable[..., T] | None"
    ) -> Callable[..., T]:
        if method is None:
            method = "__call__"
        if isinstance(method, str):
            if method == "__call__" and not callable(self):
                raise errors.ModuleAttributeError(
                    type(self).__name__, "__call__", ": define it"
                )
            if not callable(vars(self).get(method, callable)):
                raise errors.ApplyModuleInvalidMethodError(method)
            return lambda module, *args, **kwargs: getattr(module, method)(
                *args, **kwargs
            )
        if isinstance(method, types.MethodType) and isinstance(
            method.__self__, Module
        ):
            return method.__func__
        code = getattr(method, "__code__", None)
        takes_nothing = code and not (
            code.co_argcount or code.co_flags & inspect.CO_VARARGS
        )
        if not callable(method) or takes_nothing:
            raise errors.ApplyModuleInvalidMethodError(method)
        return method

    def module_paths(
        self,
        rngs: RngKeys,
        *args: PyTree,
        show_repeated: bool = False,
        mutable: Filter = state_lib.ALL_BUT_INTERMEDIATES,
        **kwargs: PyTree,
    ) -> "dict[str, Module]":
        """Returns unbound copies of the modules that `init` uses, by path.

        With `show_repeated`, a module that is called again counts again.
        """
        calls, _ = summary.record_calls(
            self, rngs, args, kwargs, mutable, show_repeated
        )
        return {
            "/".join(call.path): summary.without_transforms(call.module)
            for call in calls
        }

    def tabulate(
        self,
        rngs: RngKeys,
        *args: PyTree,
        depth: int | None = None,
        show_repeated: bool = False,
        mutable: Filter = state_lib.ALL_BUT_INTERMEDIATES,
        console_kwargs: Mapping[str, Any] | None = None,
        table_kwargs: Mapping[str, Any] = {},
        column_kwargs: Mapping[str, Any] = {},
        compute_flops: bool = False,
        compute_vjp_flops: bool = False,
        **kwargs: PyTree,
    ) -> str:
        """Returns a table of a call's modules, inputs and outputs; see `weft.linen.tabulate`."""
        tabulated = summary.tabulate(
            self,
            rngs,
            depth,
            show_repeated,
            mutable,
            console_kwargs,
            table_kwargs,
            column_kwargs,
            compute_flops,
            compute_vjp_flops,
            **kwargs,
        )
        return tabulated(*args)


@functools.lru_cache(maxsize=1024)
def _may_hold_modules(cls: type) -> bool:
    if issubclass(cls, Module | list | tuple | dict | FrozenDict):
        return True
    return hasattr(cls, "_weft_struct")


_KEEPS_NAMES = "preserve_adopted_names"


def _check_instance(x: PyTree, method: str) -> None:
    if not isinstance(x, Module):
        raise errors.InvalidInstanceModuleError("Module", method)


def _deep_copy(
    _: str, module: Module, copies: dict[int, Module], reset_names: bool
) -> Module:
    if id(module) not in copies:
        copies[id(module)] = module.clone(
            _deep_clone=copies, _reset_names=reset_names
        )
    return copies[id(module)]


def _has_bound_submodule(value: PyTree) -> bool:
    items: Iterable[Any] = ()
    if isinstance(value, Module):
        items = [vars(value).get(name) for name in value._field_names]
    elif isinstance(value, list | tuple):
        items = value
    elif isinstance(value, dict | FrozenDict):
        items = value.values()
    for item in items:
        is_bound = isinstance(item, Module) and item.scope is not None
        if is_bound or _has_bound_submodule(item):
            return True
    return False


def is_module(x: object) -> bool:
    """Returns whether `x` is a module."""
    return isinstance(x, Module)


def _hash(self: Module) -> int:
    if self.scope is not None:
        # JAX reuses a trace for an equal function, but it contains the first one's variables.
        raise TypeError(
            f"{self._name_in_errors} is bound to variables, so it has no hash, and `jax.jit`, "
            "`jax.checkpoint` or `jax.lax.cond` cannot take the module itself as the function. "
            "Use `nn.jit`, `nn.remat` or `nn.cond` of weft.linen, or a function that calls it: "
            "`lambda x: module(x)`."
        )
    fields = tuple(getattr(self, name) for name in self._field_names)
    try:
        return hash((type(self), state_lib.name_of(self), *fields))
    except TypeError as error:
        raise TypeError(
            f"{self!r} has no hash: one of its fields has none ({error})."
        ) from error


# `typing.get_type_hints` of a subclass's `__init__` looks for names where the subclass is defined.
Module.__dataclass_fields__["parent"].type = (
    Module | Scope | CurrentModule | None
)
Module.__hash__ = _hash
Module.name = state_lib.NameField()  # pyright: ignore[reportAttributeAccessIssue]
