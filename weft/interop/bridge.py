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
from weft.core.meta import is_axis_metadata, unbox
from weft.core.tracing import ThreadStack
from weft.interop.models import Method, Path, RngsLike, path_text, resolve_method
from weft.interop.nnx import NNXModel, ToNNX
from weft.interop.variables import collection_of, to_linen_var, to_nnx_var

__path__: list[str] = []  # its modules of earlier versions are found in the table of moved names


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

    def __init__(self, rngs: nnx.Rngs, mutable: Filter = False, *, initializing: bool = False):
        self.rngs = rngs
        self.mutable = tuple(mutable) if isinstance(mutable, list | set) else mutable
        self.initializing = initializing
        self.given: dict[Any, Any] = {}

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
    def call(self: "Module", *args: object, **kwargs: object) -> Any:
        with enter_module(self, in_compact):
            return f(self, *args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


class _ModuleMeta(type(nnx.Module)):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is None:
            return super().__call__(*args, **kwargs)
        # A field called `name` also gets the name that is passed for it.
        has_field = "name" in getattr(cls, "__dataclass_fields__", ())
        name = kwargs.get("name") if has_field else kwargs.pop("name", None)
        parent = kwargs.pop("parent", context.module)
        if parent is not None and parent is not context.module:
            raise errors.BridgeContextError(
                f"{cls.__name__} was given a {type(parent).__name__} as its parent, in a method of "
                f"a {type(context.module).__name__}, to which it belongs; leave parent out, or "
                "give None for a module that will belong to another."
            )
        made = super().__call__(*args, **kwargs)
        if name is None and context.in_compact:
            name = default_name(cls)
        if parent is not None and name is not None:
            context.module._attach(name, made)
        return made


def default_name(cls: type) -> str:
    """Returns a name for a submodule of the running module, from its class."""
    context: Any = current_context()
    n = context.type_counter[cls]
    context.type_counter[cls] += 1
    return f"{cls.__name__}_{n}"


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

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        made = super().__new__(cls, *args, **kwargs)
        vars(made).update(scope=None, attr_priorities={})
        return made

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            is_method = callable(value) and hasattr(value, "__code__")
            wanted = is_method and (name == "__call__" or not name.startswith("_"))
            if wanted and name != "setup" and not hasattr(value, "_with_current_module"):
                setattr(cls, name, _with_current_module(value))
        if "__init__" not in vars(cls) and "__init__" not in _names_of_bases(cls):
            dataclasses.dataclass(cls, repr=False, eq=False)

    def setup(self) -> None:
        """Makes submodules and variables, as attributes; runs when the module gets a scope."""

    # What it is made of.

    def set_attr_priority(self, name: str, value: AttrPriority) -> None:
        """Sets an attribute's position in the order of attributes; low priorities come first."""
        vars(self)["attr_priorities"] = {**self.attr_priorities, name: value}

    def _items(self) -> list[tuple[Any, Any]]:
        first = vars(self).get("attr_priorities", {})

        def order(item: tuple[Any, Any]) -> Any:
            last = AttrPriority.LOW if item[0] == "scope" else AttrPriority.DEFAULT
            return first.get(item[0], last), item[0]

        return sorted(super()._items(), key=order)

    def __setattr__(self, name: str, value: object) -> None:
        if name != "scope" and isinstance(self.scope, Scope):
            given = self.scope.given.pop(name, None)
            value = _bind_given(value, {} if given is None else given, self.scope)
        super().__setattr__(name, value)

    def _attach(self, name: str, child: object) -> None:
        if isinstance(self.scope, Scope):
            there = vars(self).get(name)
            if isinstance(there, nnx.Pytree) and name not in self.scope.given:
                self.scope.given[name] = flat_dict.unflatten_dict(_module_variables(there))
        self.set_attr_priority(name, AttrPriority.INIT_PARENT)
        setattr(self, name, child)

    def _bind(self, scope: Scope, given: Mapping[Any, Any]) -> None:
        vars(self)["scope"] = None
        super().__setattr__("scope", scope.copy())
        self.scope.given.update(given)
        for name, value in super()._items():
            if name not in ("scope", "attr_priorities"):
                setattr(self, str(name), value)
        with enter_module(self):
            self.setup()

    def _require_scope(self, what: str) -> Scope:
        if not isinstance(self.scope, Scope):
            raise errors.BridgeContextError(
                f"{what} was asked for by a {type(self).__name__} that has no variables; call it "
                "by `init` or `apply`. A module in it has variables if it is made in a compact "
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
            error.add_note(f"This is about {type(self).__name__}; give its call rngs=...")
            raise

    def is_initializing(self) -> bool:
        """Returns whether `init` is running."""
        return isinstance(self.scope, Scope) and self.scope.initializing

    def param(
        self,
        name: str,
        init_fn: Callable[..., Any],
        *init_args: object,
        unbox: bool = True,
        **init_kwargs: object,
    ) -> Any:
        """Returns a parameter, which is made if missing.

        Args:
            init_fn: makes the initial value, from a key and `init_args`.
            unbox: ignored; the variable holds the value, and its metadata the axes.

        Raises:
            BridgeContextError: outside of `init` and `apply`.
            ScopeParamShapeError: if the given parameter has another shape.
        """
        self._require_scope(f"the parameter {name!r}")
        there = self._variable("params", name)
        if there is None:
            value = init_fn(self.make_rng("params"), *init_args, **init_kwargs)
            return self._new("params", name, value)
        wanted = _shapes(lambda key: init_fn(key, *init_args, **init_kwargs))
        present = [jnp.shape(x) for x in jax.tree.leaves(there.get_raw_value())]
        if wanted != present:
            raise errors.ScopeParamShapeError(name, type(self).__name__, present, wanted)
        return there

    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., Any] | None = None,
        *init_args: object,
        unbox: bool = True,
        **init_kwargs: object,
    ) -> Any:
        """Returns a variable, which is made by `init_fn(*init_args)` if missing; see `param`.

        Raises LayerVariablesError if the variable is missing and there is no `init_fn`.
        """
        self._require_scope(f"the variable {name!r} of {col!r}")
        there = self._variable(col, name)
        if there is not None:
            return there
        if init_fn is None:
            raise errors.LayerVariablesError(
                f"{type(self).__name__} has no variable {name!r} in {col!r}, and no init_fn was "
                "given that makes it; give one, or the variable to `apply`."
            )
        return self._new(col, name, init_fn(*init_args, **init_kwargs))

    def _variable(self, col: str, name: str) -> nnx.Variable[Any] | None:
        scope: Any = self.scope
        if name in scope.given:
            setattr(self, name, scope.given[name])
        there = vars(self).get(name)
        if there is None:
            return None
        if not isinstance(there, nnx.Variable) or collection_of(type(there)) != col:
            raise errors.LayerVariablesError(
                f"{type(self).__name__}.{name} is a {type(there).__name__}, where a variable of "
                f"the collection {col!r} was to be; use another name."
            )
        return there

    def _new(self, col: str, name: str, value: object) -> nnx.Variable[Any]:
        is_boxed = is_axis_metadata(value)
        kind = nnx.variable_type_from_name(col, allow_register=True)
        setattr(self, name, to_nnx_var(col, value) if is_boxed else kind(value))
        return vars(self)[name]

    # The ways in and out.

    def init(
        self, rngs: RngsLike = None, *args: object, method: Method = "__call__", **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the variables that a method makes, as of its end.

        `rngs` are `Rngs`, a key or number, or a dict of these by stream; `method` is the method,
        its name, or a function of the module.
        """
        return self.init_with_output(rngs, *args, method=method, **kwargs)[1]

    def init_with_output(
        self,
        rngs: RngsLike = None,
        *args: Any,
        method: Method = "__call__",
        mutable: Filter = False,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Returns a method's result and the variables that it makes; see `init`."""
        call = {"rngs": rngs, "method": method, "mutable": mutable or True, "_initialize": True}
        return self.apply({}, *args, **call, **kwargs)

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: object,
        rngs: RngsLike = None,
        method: Method = "__call__",
        mutable: Filter = False,
        _initialize: bool = False,
        **kwargs: object,
    ) -> Any:
        """Calls a method on variables; `rngs` and `method` as for `init`.

        Returns its result; in a pair with all collections, as of its end, unless `mutable=False`.
        """
        if not isinstance(rngs, nnx.Rngs):
            rngs = nnx.Rngs() if rngs is None else nnx.Rngs(rngs)
        module = nnx.clone(self)
        module._bind(
            Scope(rngs, mutable, initializing=_initialize), _given_variables(self, variables)
        )
        out = resolve_method(module, method, type(self).__name__)(*args, **kwargs)
        return out if mutable is False else (out, _collections(module))


def _shapes(init: Callable[[Any], Any]) -> list[tuple[int, ...]]:

    def make(key: jax.Array) -> Any:
        made = init(key)
        return made.raw_value if isinstance(made, nnx.VariableMetadata) else unbox(made)

    return [x.shape for x in jax.tree.leaves(jax.eval_shape(make, jax.random.key(0)))]


def _names_of_bases(cls: type) -> set[str]:
    """Returns names defined by bases between a class and `Module`, without generated `__init__`."""
    bases = cls.__mro__[1 : cls.__mro__.index(Module)]
    return {n for base in bases if not dataclasses.is_dataclass(base) for n in vars(base)}


def _given_variables(module: Module, variables: Mapping[str, Any]) -> dict[Any, Any]:
    found: dict[Path, Any] = {}
    for (col, *rest), x in flat_dict.flatten_dict(variables).items():
        path = tuple(rest)
        if path in found:
            raise errors.LayerVariablesError(
                f"{type(module).__name__} was given {path_text(path)!r} in two collections, and a "
                "module of NNX has one attribute of a name; leave one of them out."
            )
        found[path] = x if col == _ARRAYS else to_nnx_var(col, x, lay_out=False)
    return flat_dict.unflatten_dict(found)


_ARRAYS = "arrays"
"""The collection of arrays that are in no variable."""


def _bind_given(value: Any, given: Any, scope: Scope) -> Any:
    if isinstance(value, Module):
        if value.scope is None:
            value._bind(scope, given)
        else:
            value.scope.given.update(given)
        return value
    if isinstance(value, list | tuple | dict):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        parts = given if isinstance(given, Mapping) else {}
        items = {key: _bind_given(value[key], parts.get(key, {}), scope) for key in keys}
        same = all(items[key] is value[key] for key in keys)
        return value if same else type(value)(items if isinstance(value, dict) else items.values())
    if isinstance(value, ToNNX):
        for name, x in given.items():
            setattr(value, name, x)
    elif isinstance(value, nnx.Pytree) and given:
        nnx.update(value, given)
    elif isinstance(value, nnx.Variable | jax.Array) and not isinstance(given, dict):
        return given
    return value


def _module_variables(module: object) -> dict[Path, Any]:
    found = nnx.to_flat_state(nnx.split(module)[1])
    return {
        path: leaf
        for path, leaf in found
        if "scope" not in path and not isinstance(leaf, nnx.RngState)
    } | _unused_given(module)


def _unused_given(module: object) -> dict[Path, Any]:
    return {
        (*path, *below): leaf
        for path, x in nnx.iter_graph(module)
        if isinstance(x, Module) and isinstance(x.scope, Scope)
        for below, leaf in flat_dict.flatten_dict(x.scope.given).items()
    }


def _collections(module: object) -> dict[str, Any]:
    return to_collections(_module_variables(module))


def to_collections(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """Returns variables and arrays by path as collections."""
    found: dict[Path, Any] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, nnx.Variable):
            found[collection_of(type(leaf)), *path] = to_linen_var(leaf)
        else:
            found[_ARRAYS, *path] = leaf
    return flat_dict.unflatten_dict(found)


M = TypeVar("M")


def _current_parent(what: str) -> tuple[Module, bool]:
    """Returns the running module, and whether its running method is compact."""
    context = current_context()
    if context is None:
        raise errors.BridgeContextError(
            f"{what} was called outside of modules; call it in a method of a bridge.Module that "
            "`init` or `apply` runs."
        )
    return context.module, context.in_compact


def nnx_in_bridge_mdl(factory: Callable[[nnx.Rngs], M], name: str | None = None) -> M:
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
        made = factory(scope.rngs)
        return _attach_child(parent, _child_name(name, is_compact, type(made)), made)
    if not is_compact:
        # The attribute, which is not known yet, has the values that replace these.
        return factory(nnx.Rngs(0, **{stream: draw() for stream, draw in scope.rngs.items()}))
    # Without a key for parameters these were all given, and first values are not computed.
    model = NNXModel(lambda rngs: factory(rngs))
    keys = {stream: draw() for stream, draw in scope.rngs.items()}
    name = name or default_name(model.module_type(keys))
    given = to_collections(flat_dict.flatten_dict(scope.given.pop(name, {})))
    made = model.merge_values(given, keys, mutable=False).module
    return _attach_child(parent, name, made)


def linen_in_bridge_mdl(linen_module: object, name: str | None = None) -> ToNNX:
    """Returns a Linen module as a submodule of the running bridge module.

    `init` of the bridge module makes its variables. For the rest see `nnx_in_bridge_mdl`.
    """
    parent, is_compact = _current_parent("linen_in_bridge_mdl")
    scope = parent._require_scope("the PRNG streams")
    made = _LinenModule(linen_module, scope)
    return _attach_child(parent, _child_name(name, is_compact, type(linen_module)), made)


def _child_name(name: str | None, is_compact: bool, cls: type) -> str | None:
    # In `setup` a submodule has the name of its attribute.
    return (name or default_name(cls)) if is_compact else None


def _attach_child(parent: Module, name: str | None, made: object) -> Any:
    if name is None:
        return made
    parent._attach(name, made)
    return getattr(parent, name)


class _LinenModule(ToNNX):
    def __init__(self, module: object, scope: Scope):
        super().__init__(module, scope.rngs)
        self.to_nnx__mutable = scope.mutable
        self.to_nnx__initializing = scope.initializing

    def __call__(self, *args: Any, rngs: RngsLike = None, **kwargs: Any) -> Any:
        if self.to_nnx__initializing and not self._own_variables():
            kwargs.pop("mutable", None)
            return self._init_with_output(self._keys(rngs), args, kwargs)
        return super().__call__(*args, rngs=rngs, **kwargs)


_LinenModule.__name__ = _LinenModule.__qualname__ = "ToNNX"
