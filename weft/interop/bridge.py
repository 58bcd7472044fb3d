"""NNX modules in the style of Linen: with `setup`, `compact`, `param` and `apply`.

A module is a description until `init` or `apply` copies it and gives the copy a scope. Variables
and submodules are attributes of the copy, and are returned as collections when the call ends.
Modules of NNX and of Linen can be submodules. `weft.nnx.bridge` is the public name.
"""

import contextlib
import dataclasses
import enum
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

from weft import errors, nnx
from weft.core import flat_dict
from weft.core.filters import Filter
from weft.core.meta import unbox
from weft.core.tracing import ThreadStack
from weft.interop.models import (
    Layer,
    Method,
    Path,
    RngsLike,
    path_text,
    resolve_method,
)
from weft.interop.nnx import NNXModel, ToNNX
from weft.interop.variables import collection_of, to_linen_var, to_nnx_var
from weft.typing import PyTree

__path__: list[
    str
] = []  # its modules of earlier versions are found in the table of moved names


Value = Any
"""Value of an attribute: a module, an array, a container of these, or any other object."""


class AttrPriority(enum.IntEnum):
    """Priorities in the order of a module's attributes; low ones first."""

    HIGH = 0
    INIT_PARENT = 20
    DEFAULT = 50
    LOW = 100


class Scope(nnx.Pytree):
    """Context that `init` or `apply` passes to a module and its submodules.

    Attributes:
        rngs: the PRNG streams, shared by all modules of a call.
        mutable: the collections whose changes the caller wants.
        initializing: whether `init` runs.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        mutable: Filter = False,
        *,
        initializing: bool = False,
    ):
        self.rngs = rngs
        self.mutable = (
            tuple(mutable) if isinstance(mutable, list | set) else mutable
        )
        self.initializing = initializing
        # Values for attributes that the module has not made yet.
        self.unused_variables: dict[Any, Any] = {}

    def copy(self) -> "Scope":
        """Returns a scope with the same streams and no given variables."""
        return Scope(self.rngs, self.mutable, initializing=self.initializing)


@dataclasses.dataclass
class ModuleStackEntry:
    """A module with a running method.

    Attributes:
        type_counter: number of unnamed submodules that the method has made, by class.
    """

    module: "Module"
    in_compact: bool
    type_counter: Counter[type] = dataclasses.field(default_factory=Counter)


_stack = ThreadStack[ModuleStackEntry]()


def current_context() -> ModuleStackEntry | None:
    """Returns the innermost running module's entry, or None."""
    return _stack.top


def current_module() -> "Module | None":
    """Returns the innermost running module, or None."""
    context = current_context()
    return None if context is None else context.module


def enter_module(
    module: "Module", in_compact: bool = False
) -> contextlib.AbstractContextManager[ModuleStackEntry]:
    """Enters a method of a module."""
    return _stack.push(ModuleStackEntry(module, in_compact))


F = TypeVar("F", bound=Callable[..., Any])


def compact(f: F) -> F:
    """Marks a method in which submodules can be made; they are named by their classes.

    >>> from weft.nnx import bridge
    >>> class Dense(bridge.Module):
    ...     features: int
    ...     def __call__(self, x):
    ...         init = jax.nn.initializers.normal()
    ...         return x @ self.param("kernel", init, (x.shape[-1], self.features))
    >>> class Pair(bridge.Module):
    ...     @bridge.compact
    ...     def __call__(self, x):
    ...         return Dense(2)(Dense(4)(x))
    >>> variables = Pair().init(jax.random.key(0), jnp.ones((1, 3)))
    >>> jax.tree.map(jnp.shape, variables)
    {'params': {'Dense_0': {'kernel': (4, 2)}, 'Dense_1': {'kernel': (3, 4)}}}
    """
    call = _with_current_module(f, in_compact=True)
    vars(call)["_with_current_module"] = True
    return call


def _with_current_module(f: F, in_compact: bool = False) -> F:
    @functools.wraps(f)
    def call(self: "Module", *args: PyTree, **kwargs: PyTree) -> PyTree:
        with enter_module(self, in_compact):
            return f(self, *args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


class _ModuleMeta(type(nnx.Module)):
    def __call__(cls, *args: PyTree, **kwargs: PyTree) -> PyTree:
        context = current_context()
        if context is None:
            return super().__call__(*args, **kwargs)
        name = kwargs.get("name")
        # A field called `name` also gets the name that is passed for it.
        if "name" not in getattr(cls, "__dataclass_fields__", ()):
            kwargs.pop("name", None)
        parent = kwargs.pop("parent", context.module)
        if parent is not None and parent is not context.module:
            raise errors.BridgeContextError(
                f"{cls.__name__} was given a {type(parent).__name__} as its parent, in a method of "
                f"a {type(context.module).__name__}, to which it belongs; leave parent out, or "
                "give None for a module that will belong to another."
            )
        module = super().__call__(*args, **kwargs)
        if name is None and context.in_compact:
            name = default_name(cls)
        if parent is not None and name is not None:
            context.module._attach(name, module)
        return module


def default_name(cls: type) -> str:
    """Returns a name for a submodule of the running module, from its class."""
    context: Any = current_context()
    number = context.type_counter[cls]
    context.type_counter[cls] += 1
    return f"{cls.__name__}_{number}"


@dataclass_transform()
class Module(nnx.Module, metaclass=_ModuleMeta):
    """Base class of NNX modules in the style of Linen.

    Annotated attributes are fields, as in a dataclass. In methods, submodules accept `name`, that
    of their attribute, and `parent=None`, to belong to the module that they are assigned to.

    Attributes:
        scope: set by `init` or `apply`; None outside of them.
        attr_priorities: order of attributes, see `set_attr_priority`.
    """

    if TYPE_CHECKING:  # outside of it they would be fields
        scope: Any
        attr_priorities: dict[str, int]

    def __new__(cls, *args: PyTree, **kwargs: PyTree) -> "Module":
        module = super().__new__(cls, *args, **kwargs)
        vars(module).update(scope=None, attr_priorities={})
        return module

    def __init_subclass__(cls, **kwargs: PyTree) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            is_method = callable(value) and hasattr(value, "__code__")
            is_public = name == "__call__" or not name.startswith("_")
            is_entered = name == "setup" or hasattr(
                value, "_with_current_module"
            )
            if is_method and is_public and not is_entered:
                setattr(cls, name, _with_current_module(value))
        if "__init__" not in vars(cls) and "__init__" not in _names_of_bases(
            cls
        ):
            dataclasses.dataclass(cls, repr=False, eq=False)

    def setup(self) -> None:
        """Makes submodules and variables, as attributes; runs when the module gets a scope."""

    # What it is made of.

    def set_attr_priority(self, name: str, value: AttrPriority) -> None:
        """Sets an attribute's position in the order of attributes; low priorities come first."""
        vars(self)["attr_priorities"] = {**self.attr_priorities, name: value}

    def _items(self) -> list[tuple[Any, Any]]:
        priorities = {
            "scope": AttrPriority.LOW,
            **vars(self).get("attr_priorities", {}),
        }

        def order(item: tuple[Any, Any]) -> tuple[AttrPriority, Any]:
            name, _ = item
            return priorities.get(name, AttrPriority.DEFAULT), name

        return sorted(super()._items(), key=order)

    def __setattr__(self, name: str, value: Value) -> None:
        if name != "scope" and isinstance(self.scope, Scope):
            variables = self.scope.unused_variables.pop(name, None)
            if variables is None:
                variables = {}
            value = _with_variables(value, variables, self.scope)
        super().__setattr__(name, value)

    def _attach(self, name: str, child: Value) -> None:
        if isinstance(self.scope, Scope):
            # A submodule that is made in each call takes over the variables of the call before.
            earlier_child = vars(self).get(name)
            unused_variables = self.scope.unused_variables
            if (
                isinstance(earlier_child, nnx.Pytree)
                and name not in unused_variables
            ):
                variables = _module_variables(earlier_child)
                unused_variables[name] = flat_dict.unflatten_dict(variables)
        self.set_attr_priority(name, AttrPriority.INIT_PARENT)
        setattr(self, name, child)

    def _bind(self, scope: Scope, variables: Mapping[Any, Any]) -> None:
        vars(self)["scope"] = None
        super().__setattr__("scope", scope.copy())
        self.scope.unused_variables.update(variables)
        for name, value in super()._items():
            if name not in ("scope", "attr_priorities"):
                setattr(self, str(name), value)
        with enter_module(self):
            self.setup()

    def _require_scope(self, subject: str) -> Scope:
        if not isinstance(self.scope, Scope):
            raise errors.BridgeContextError(
                f"{subject} was asked for by a {type(self).__name__} that has no variables; call "
                "it by `init` or `apply`. A module in it has variables if it is made in a compact "
                "method, or assigned to an attribute while `setup` or a method runs."
            )
        return self.scope

    # What methods ask for.

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of this module and its submodules, by collection."""
        return _collections(self) if isinstance(self.scope, Scope) else {}

    def make_rng(self, name: str = "default") -> jax.Array:
        """Returns a new PRNG key of a stream; `default` replaces missing streams.

        Raises RngStreamNotFoundError if there is neither.
        """
        rngs = self._require_scope(f"a key of the PRNG stream {name!r}").rngs
        try:
            return rngs[name]()
        except errors.RngStreamNotFoundError as error:
            error.add_note(
                f"This is about {type(self).__name__}; give its call rngs=..."
            )
            raise

    def is_initializing(self) -> bool:
        """Returns whether `init` is running."""
        return isinstance(self.scope, Scope) and self.scope.initializing

    def param(
        self,
        name: str,
        init_fn: Callable[..., Any],
        *init_args: PyTree,
        unbox: bool = True,
        **init_kwargs: PyTree,
    ) -> nnx.Variable[Any]:
        """Returns a parameter, which is made if missing.

        Args:
            init_fn: makes the initial value, from a key and `init_args`.
            unbox: ignored; the variable holds the value, and its metadata the axes.

        Raises:
            BridgeContextError: outside of `init` and `apply`.
            ScopeParamShapeError: if the given parameter has another shape.
        """
        self._require_scope(f"the parameter {name!r}")
        variable = self._variable("params", name)
        if variable is None:
            value = init_fn(self.make_rng("params"), *init_args, **init_kwargs)
            return self._new("params", name, value)
        init_shapes = _shapes(
            lambda key: init_fn(key, *init_args, **init_kwargs)
        )
        leaves = jax.tree.leaves(variable.get_raw_value())
        shapes = [jnp.shape(leaf) for leaf in leaves]
        if init_shapes != shapes:
            raise errors.ScopeParamShapeError(
                name, type(self).__name__, shapes, init_shapes
            )
        return variable

    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., Any] | None = None,
        *init_args: PyTree,
        unbox: bool = True,
        **init_kwargs: PyTree,
    ) -> nnx.Variable[Any]:
        """Returns a variable, which is made by `init_fn(*init_args)` if missing; see `param`.

        Raises LayerVariablesError if the variable is missing and there is no `init_fn`.
        """
        self._require_scope(f"the variable {name!r} of {col!r}")
        variable = self._variable(col, name)
        if variable is not None:
            return variable
        if init_fn is None:
            raise errors.LayerVariablesError(
                f"{type(self).__name__} has no variable {name!r} in {col!r}, and no init_fn was "
                "given that makes it; give one, or the variable to `apply`."
            )
        return self._new(col, name, init_fn(*init_args, **init_kwargs))

    def _variable(self, col: str, name: str) -> nnx.Variable[Any] | None:
        scope: Any = self.scope
        if name in scope.unused_variables:
            setattr(self, name, scope.unused_variables[name])
        attribute = vars(self).get(name)
        if attribute is None:
            return None
        if (
            not isinstance(attribute, nnx.Variable)
            or collection_of(type(attribute)) != col
        ):
            raise errors.LayerVariablesError(
                f"{type(self).__name__}.{name} is a {type(attribute).__name__}, where a variable "
                f"of the collection {col!r} was to be; use another name."
            )
        return attribute

    def _new(self, col: str, name: str, value: PyTree) -> nnx.Variable[Any]:
        setattr(self, name, to_nnx_var(col, value))
        return vars(self)[name]

    # The ways in and out.

    def init(
        self,
        rngs: RngsLike = None,
        *args: PyTree,
        method: Method = "__call__",
        **kwargs: PyTree,
    ) -> dict[str, Any]:
        """Returns the variables that a method makes, as of its end.

        `rngs` are `Rngs`, a key or number, or a dict of these by stream; `method` is the method,
        its name, or a function of the module.
        """
        _, variables = self.init_with_output(
            rngs, *args, method=method, **kwargs
        )
        return variables

    def init_with_output(
        self,
        rngs: RngsLike = None,
        *args: PyTree,
        method: Method = "__call__",
        mutable: Filter = False,
        **kwargs: PyTree,
    ) -> tuple[Any, dict[str, Any]]:
        """Returns a method's result and the variables that it makes; see `init`."""
        return self.apply(
            {},
            *args,
            rngs=rngs,
            method=method,
            mutable=mutable or True,
            _initialize=True,
            **kwargs,
        )

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: PyTree,
        rngs: RngsLike = None,
        method: Method = "__call__",
        mutable: Filter = False,
        _initialize: bool = False,
        **kwargs: PyTree,
    ) -> PyTree:
        """Calls a method on variables; `rngs` and `method` as for `init`.

        Returns its result; in a pair with all collections, as of its end, unless `mutable=False`.
        """
        if not isinstance(rngs, nnx.Rngs):
            rngs = nnx.Rngs() if rngs is None else nnx.Rngs(rngs)
        module = nnx.clone(self)
        scope = Scope(rngs, mutable, initializing=_initialize)
        module._bind(scope, _by_attribute(self, variables))
        call = resolve_method(module, method, type(self).__name__)
        out = call(*args, **kwargs)
        if mutable is False:
            return out
        return out, _collections(module)


def _shapes(init: Callable[[jax.Array], PyTree]) -> list[tuple[int, ...]]:
    """Returns the shapes of what an initializer makes."""

    def initial_value(key: jax.Array) -> PyTree:
        value = init(key)
        return (
            value.raw_value
            if isinstance(value, nnx.VariableMetadata)
            else unbox(value)
        )

    shapes = jax.eval_shape(initial_value, jax.random.key(0))
    return [x.shape for x in jax.tree.leaves(shapes)]


def _names_of_bases(cls: type) -> set[str]:
    """Returns names defined by bases between a class and `Module`, without generated `__init__`."""
    names: set[str] = set()
    for base in cls.__mro__[1 : cls.__mro__.index(Module)]:
        if not dataclasses.is_dataclass(base):
            names.update(vars(base))
    return names


def _by_attribute(
    module: Module, variables: Mapping[str, Any]
) -> dict[Any, Any]:
    """Returns the entries of collections as variables, by the attributes that they belong to."""
    variables_by_path: dict[Path, Any] = {}
    for (collection, *names), entry in flat_dict.flatten_dict(
        variables
    ).items():
        path = tuple(names)
        if path in variables_by_path:
            raise errors.LayerVariablesError(
                f"{type(module).__name__} was given {path_text(path)!r} in two collections, and a "
                "module of NNX has one attribute of a name; leave one of them out."
            )
        if collection != _ARRAYS:
            entry = to_nnx_var(collection, entry, lay_out=False)
        variables_by_path[path] = entry
    return flat_dict.unflatten_dict(variables_by_path)


_ARRAYS = "arrays"
"""The collection of arrays that are in no variable."""


def _with_variables(value: Value, variables: PyTree, scope: Scope) -> Value:
    """Returns the value of an attribute with the variables that the caller gave for it.

    A module is changed in place; a container with a variable or array is copied.
    """
    if isinstance(value, Module):
        if value.scope is None:
            value._bind(scope, variables)
        else:
            value.scope.unused_variables.update(variables)
        return value
    if isinstance(value, list | tuple | dict):
        return _container_with_variables(value, variables, scope)
    if isinstance(value, ToNNX):
        for name, variable in variables.items():
            setattr(value, name, variable)
    elif isinstance(value, nnx.Pytree) and variables:
        nnx.update(value, variables)
    elif isinstance(value, nnx.Variable | jax.Array) and not isinstance(
        variables, dict
    ):
        return variables
    return value


def _container_with_variables(
    container: list[Any] | tuple[Any, ...] | dict[Any, Any],
    variables: PyTree,
    scope: Scope,
) -> Value:
    if isinstance(container, dict):
        items = container
    else:
        items = dict(enumerate(container))
    variables_by_key: Mapping[Any, Any] = {}
    if isinstance(variables, Mapping):
        variables_by_key = variables
    new_items: dict[Any, Any] = {}
    is_same = True
    for key, item in items.items():
        new_items[key] = _with_variables(
            item, variables_by_key.get(key, {}), scope
        )
        is_same = is_same and new_items[key] is item
    if is_same:
        return container
    if isinstance(container, dict):
        return type(container)(new_items)
    return type(container)(new_items.values())


def _module_variables(module: nnx.Pytree) -> dict[Path, Any]:
    _, state = nnx.split(module)
    variables: dict[Path, Any] = {}
    for path, leaf in nnx.to_flat_state(state):
        if "scope" not in path and not isinstance(leaf, nnx.RngState):
            variables[path] = leaf
    # Variables that no method has asked for are not lost.
    for module_path, node in nnx.iter_graph(module):
        if isinstance(node, Module) and isinstance(node.scope, Scope):
            for path, leaf in flat_dict.flatten_dict(
                node.scope.unused_variables
            ).items():
                variables[*module_path, *path] = leaf
    return variables


def _collections(module: Module) -> dict[str, Any]:
    return to_collections(_module_variables(module))


def to_collections(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """Returns variables and arrays by path as collections."""
    entries: dict[Path, Any] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, nnx.Variable):
            entries[collection_of(type(leaf)), *path] = to_linen_var(leaf)
        else:
            entries[_ARRAYS, *path] = leaf
    return flat_dict.unflatten_dict(entries)


M = TypeVar("M")


def _current_parent(function_name: str) -> tuple[Module, bool]:
    """Returns the running module, and whether its running method is compact."""
    context = current_context()
    if context is None:
        raise errors.BridgeContextError(
            f"{function_name} was called outside of modules; call it in a method of a "
            "bridge.Module that `init` or `apply` runs."
        )
    return context.module, context.in_compact


def nnx_in_bridge_mdl(
    factory: Callable[[nnx.Rngs], M], name: str | None = None
) -> M:
    """Returns an NNX module as a submodule of the running bridge module.

    `factory` makes it from the streams. In `setup` it has the name of its attribute, otherwise
    `name`, which is by default derived from the class. Raises BridgeContextError
    outside of modules, or of `init` and `apply`.

    >>> from weft.nnx import bridge
    >>> class Head(bridge.Module):
    ...     @bridge.compact
    ...     def __call__(self, x):
    ...         return bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 2, rngs=rngs))(x)
    >>> Head().init(0, jnp.ones((1, 3)))["params"]["Linear_0"]["kernel"].shape
    (3, 2)
    """
    parent, is_compact = _current_parent("nnx_in_bridge_mdl")
    scope = parent._require_scope("the PRNG streams")
    if "params" in scope.rngs or "default" in scope.rngs:
        module = factory(scope.rngs)
        return _attach_child(
            parent, _child_name(name, is_compact, type(module)), module
        )
    keys = {stream: draw() for stream, draw in scope.rngs.items()}
    if not is_compact:
        # The attribute, which is not known yet, has the values that replace these.
        return factory(nnx.Rngs(0, **keys))
    # Without a key for parameters these were all given, and first values are not computed.
    model = NNXModel(lambda rngs: factory(rngs))
    name = name or default_name(model.module_type(keys))
    variables = flat_dict.flatten_dict(scope.unused_variables.pop(name, {}))
    merged = model.merge_values(to_collections(variables), keys, mutable=False)
    return _attach_child(parent, name, merged.module)


def linen_in_bridge_mdl(linen_module: Layer, name: str | None = None) -> ToNNX:
    """Returns a Linen module as a submodule of the running bridge module.

    `init` of the bridge module makes its variables. For the rest see `nnx_in_bridge_mdl`.
    """
    parent, is_compact = _current_parent("linen_in_bridge_mdl")
    scope = parent._require_scope("the PRNG streams")
    child_name = _child_name(name, is_compact, type(linen_module))
    return _attach_child(parent, child_name, _LinenModule(linen_module, scope))


def _child_name(name: str | None, is_compact: bool, cls: type) -> str | None:
    if not is_compact:
        return None  # in `setup` a submodule has the name of its attribute
    return name or default_name(cls)


def _attach_child(parent: Module, name: str | None, child: Value) -> Value:
    if name is None:
        return child
    parent._attach(name, child)
    return getattr(parent, name)


class _LinenModule(ToNNX):
    def __init__(self, module: Layer, scope: Scope):
        super().__init__(module, scope.rngs)
        self.to_nnx__mutable = scope.mutable
        self.to_nnx__initializing = scope.initializing

    def __call__(
        self, *args: PyTree, rngs: RngsLike = None, **kwargs: PyTree
    ) -> PyTree:
        if self.to_nnx__initializing and not self._own_variables():
            kwargs.pop("mutable", None)
            return self._init_with_output(self._keys(rngs), args, kwargs)
        return super().__call__(*args, rngs=rngs, **kwargs)


_LinenModule.__name__ = _LinenModule.__qualname__ = "ToNNX"
