"""NNX modules in the style of Linen: with `setup`, `compact`, `param` and `apply`.

A module is a description until `init` or `apply` copies it and gives the copy a scope. Variables
and submodules are attributes of the copy, and are returned as collections when the call ends.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

from weft import nnx
from weft.core.meta import is_axis_metadata, unbox
from weft.errors import (
    BridgeContextError,
    LayerVariablesError,
    RngStreamNotFoundError,
    ScopeParamShapeError,
)
from weft.interop.bridge.scopes import (
    AttrPriority,
    Scope,
    current_context,
    running,
)
from weft.interop.bridge.to_nnx import ToNNX
from weft.interop.bridge.variables import collection_of, to_linen_var, to_nnx_var
from weft.interop.models import Path, flat, method_of, nested, shown
from weft.nnx.initial_metadata import VariableMetadata
from weft.nnx.kinds import variable_type_from_name
from weft.nnx.rngs import Rngs, RngState
from weft.nnx.variables import Variable

__all__ = ["Module", "compact"]

F = TypeVar("F", bound=Callable[..., Any])


def compact(f: F) -> F:
    """Marks a method in which submodules can be made; they are named by their classes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from weft.nnx import bridge
        >>> class Dense(bridge.Module):
        ...     features: int
        ...
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

    @functools.wraps(f)
    def call(self: "Module", *args: Any, **kwargs: Any) -> Any:
        with running(self, in_compact=True):
            return f(self, *args, **kwargs)

    vars(call)["_runs"] = True
    return call  # pyright: ignore[reportReturnType]


def _runs(f: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method set its module as the current one."""

    @functools.wraps(f)
    def call(self: "Module", *args: Any, **kwargs: Any) -> Any:
        with running(self):
            return f(self, *args, **kwargs)

    return call


class _Type(type(nnx.Module)):
    """Metaclass of modules: a module made in a compact method is a submodule."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is None or not context.in_compact:
            return super().__call__(*args, **kwargs)
        name = kwargs.pop("name", None)
        made = super().__call__(*args, **kwargs)
        context.module._attach(name or next_name(cls), made)
        return made


def next_name(cls: type) -> str:
    """Returns a name for a submodule of the running module, from its class."""
    context: Any = current_context()
    n = context.type_counter[cls]
    context.type_counter[cls] += 1
    return f"{cls.__name__}_{n}"


@dataclass_transform()
class Module(nnx.Module, metaclass=_Type):
    """Base class of NNX modules in the style of Linen.

    Annotated attributes are fields, as in a dataclass. In a compact method, submodules accept
    `name`, the name of their attribute.

    Attributes:
        scope: set by `init` or `apply`; None outside of them.
        attr_priorities: order of attributes, see `set_attr_priority`.
    """

    if TYPE_CHECKING:  # outside of it they would be fields
        scope: Any
        attr_priorities: dict[str, int]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls, *args, **kwargs)
        vars(made).update(scope=None, attr_priorities={})
        return made

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            is_method = callable(value) and hasattr(value, "__code__")
            wanted = is_method and (name == "__call__" or not name.startswith("_"))
            if wanted and name != "setup" and not hasattr(value, "_runs"):
                setattr(cls, name, _runs(value))
        if "__init__" not in vars(cls) and "__init__" not in _own_of_bases(cls):
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

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "scope" and isinstance(self.scope, Scope):
            given = self.scope.given.pop(name, None)
            value = _with_given(value, {} if given is None else given, self.scope)
        super().__setattr__(name, value)

    def _attach(self, name: str, child: Any) -> None:
        """Makes a module a submodule; an earlier one of the same name shares its variables."""
        if isinstance(self.scope, Scope):
            there = vars(self).get(name)
            if isinstance(there, nnx.Pytree) and name not in self.scope.given:
                self.scope.given[name] = nested(_variables_in(there))
        setattr(self, name, child)

    def _bind(self, scope: Scope, given: Mapping[Any, Any]) -> None:
        vars(self)["scope"] = None
        super().__setattr__("scope", scope.copy())
        self.scope.given.update(given)
        for name, value in super()._items():
            if name not in ("scope", "attr_priorities"):
                setattr(self, str(name), value)
        with running(self):
            self.setup()

    def _bound(self, what: str) -> Scope:
        if not isinstance(self.scope, Scope):
            raise BridgeContextError(
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

        Raises:
            RngStreamNotFoundError: if there is neither.
        """
        rngs = self._bound(f"a key of the PRNG stream {name!r}").rngs
        try:
            return rngs[name]()
        except RngStreamNotFoundError as error:
            error.add_note(f"This is about {type(self).__name__}; give its call rngs=...")
            raise

    def is_initializing(self) -> bool:
        """Returns whether `init` is running."""
        return isinstance(self.scope, Scope) and self.scope.initializing

    def param(
        self,
        name: str,
        init_fn: Callable[..., Any],
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> Any:
        """Returns a parameter, which is made if missing.

        Args:
            name: its name, an attribute.
            init_fn: makes the initial value, from a key and `init_args`.
            *init_args: for `init_fn`, such as the shape.
            unbox: ignored; the variable holds the value, and its metadata the axes.
            **init_kwargs: for `init_fn`.

        Raises:
            BridgeContextError: outside of `init` and `apply`.
            ScopeParamShapeError: if the given parameter has another shape.
        """
        self._bound(f"the parameter {name!r}")
        there = self._variable("params", name)
        if there is None:
            value = init_fn(self.make_rng("params"), *init_args, **init_kwargs)
            return self._new("params", name, value)
        wanted = _shapes(lambda key: init_fn(key, *init_args, **init_kwargs))
        present = [jnp.shape(x) for x in jax.tree.leaves(there.get_raw_value())]
        if wanted != present:
            raise ScopeParamShapeError(name, type(self).__name__, present, wanted)
        return there

    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., Any] | None = None,
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> Any:
        """Returns a variable, which is made if missing.

        Args:
            col: its collection.
            name: its name, an attribute.
            init_fn: makes the initial value, from `init_args`.
            *init_args: for `init_fn`.
            unbox: ignored, see `param`.
            **init_kwargs: for `init_fn`.

        Raises:
            BridgeContextError: outside of `init` and `apply`.
            LayerVariablesError: if the variable is missing and there is no `init_fn`.
        """
        self._bound(f"the variable {name!r} of {col!r}")
        there = self._variable(col, name)
        if there is not None:
            return there
        if init_fn is None:
            raise LayerVariablesError(
                f"{type(self).__name__} has no variable {name!r} in {col!r}, and no init_fn was "
                "given that makes it; give one, or the variable to `apply`."
            )
        return self._new(col, name, init_fn(*init_args, **init_kwargs))

    def _variable(self, col: str, name: str) -> Variable[Any] | None:
        scope: Any = self.scope
        if name in scope.given:
            setattr(self, name, scope.given[name])
        there = vars(self).get(name)
        if there is None:
            return None
        if not isinstance(there, Variable) or collection_of(type(there)) != col:
            raise LayerVariablesError(
                f"{type(self).__name__}.{name} is a {type(there).__name__}, where a variable of "
                f"the collection {col!r} was to be; use another name."
            )
        return there

    def _new(self, col: str, name: str, value: Any) -> Variable[Any]:
        is_boxed = is_axis_metadata(value)
        kind = variable_type_from_name(col, allow_register=True)
        setattr(self, name, to_nnx_var(col, value) if is_boxed else kind(value))
        return vars(self)[name]

    # The ways in and out.

    def init(
        self, rngs: Any = None, *args: Any, method: Any = "__call__", **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the variables that a method makes, as of its end.

        Args:
            rngs: `Rngs`, a key or number, or a dict of these by stream.
            *args: of the method.
            method: the method, its name, or a function of the module.
            **kwargs: of the method.
        """
        return self.init_with_output(rngs, *args, method=method, **kwargs)[1]

    def init_with_output(
        self,
        rngs: Any = None,
        *args: Any,
        method: Any = "__call__",
        mutable: Any = False,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Returns a method's result and the variables that it makes; see `init`."""
        call = {"rngs": rngs, "method": method, "mutable": mutable or True, "_initialize": True}
        return self.apply({}, *args, **call, **kwargs)

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: Any = None,
        method: Any = "__call__",
        mutable: Any = False,
        _initialize: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Calls a method on variables.

        Args:
            variables: the collections, as returned by `init`.
            *args: of the method.
            rngs, method: see `init`.
            mutable: whether to return the variables as of the method's end.
            _initialize: whether this is `init`.
            **kwargs: of the method.

        Returns:
            The method's result; a pair of it and all collections unless `mutable` is False.
        """
        if not isinstance(rngs, Rngs):
            rngs = Rngs() if rngs is None else Rngs(rngs)
        module = nnx.clone(self)
        module._bind(Scope(rngs, mutable, initializing=_initialize), _given(self, variables))
        out = method_of(module, method, type(self).__name__)(*args, **kwargs)
        return out if mutable is False else (out, _collections(module))


def _shapes(init: Callable[[Any], Any]) -> list[tuple[int, ...]]:
    """Returns the shapes of an initializer's results."""

    def make(key: Any) -> Any:
        made = init(key)
        return made.raw_value if isinstance(made, VariableMetadata) else unbox(made)

    return [x.shape for x in jax.tree.leaves(jax.eval_shape(make, jax.random.key(0)))]


def _own_of_bases(cls: type) -> set[str]:
    """Returns names defined by bases between a class and `Module`, without generated `__init__`."""
    bases = cls.__mro__[1 : cls.__mro__.index(Module)]
    return {n for base in bases if not dataclasses.is_dataclass(base) for n in vars(base)}


def _given(module: Module, variables: Mapping[str, Any]) -> dict[Any, Any]:
    """Returns collections as variables, nested by attribute."""
    found: dict[Path, Any] = {}
    for (col, *rest), x in flat(variables).items():
        path = tuple(rest)
        if path in found:
            raise LayerVariablesError(
                f"{type(module).__name__} was given {shown(path)!r} in two collections, and a "
                "module of NNX has one attribute of a name; leave one of them out."
            )
        found[path] = x if col == _ARRAYS else to_nnx_var(col, x, lay_out=False)
    return nested(found)


_ARRAYS = "arrays"
"""The collection of arrays that are in no variable."""


def _with_given(value: Any, given: Any, scope: Scope) -> Any:
    """Returns a new value of an attribute, with its given variables."""
    if isinstance(value, Module):
        if value.scope is None:
            value._bind(scope, given)
        return value
    if isinstance(value, list | tuple | dict):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        items = {key: _with_given(value[key], _part(given, key), scope) for key in keys}
        same = all(items[key] is value[key] for key in keys)
        return value if same else type(value)(items if isinstance(value, dict) else items.values())
    if isinstance(value, ToNNX):
        for name, x in given.items():
            setattr(value, name, x)
    elif isinstance(value, nnx.Pytree) and given:
        nnx.update(value, given)
    elif isinstance(value, Variable | jax.Array) and not isinstance(given, dict):
        return given
    return value


def _part(given: Any, key: Any) -> Any:
    return given.get(key, {}) if isinstance(given, Mapping) else {}


def _variables_in(module: Any) -> dict[Path, Any]:
    """Returns a module's variables and arrays by path, without scopes and streams."""
    found = nnx.to_flat_state(nnx.split(module)[1])
    return {
        path: leaf for path, leaf in found if "scope" not in path and not isinstance(leaf, RngState)
    } | _asked_for_by_nobody(module)


def _asked_for_by_nobody(module: Any) -> dict[Path, Any]:
    """Returns the given variables of a module and its submodules that no method has used."""
    return {
        (*path, *below): leaf
        for path, x in nnx.iter_graph(module)
        if isinstance(x, Module) and isinstance(x.scope, Scope)
        for below, leaf in flat(x.scope.given).items()
    }


def _collections(module: Any) -> dict[str, Any]:
    return by_collection(_variables_in(module))


def by_collection(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """Returns variables and arrays by path as collections."""
    found: dict[Path, Any] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, Variable):
            found[collection_of(type(leaf)), *path] = to_linen_var(leaf)
        else:
            found[_ARRAYS, *path] = leaf
    return nested(found)
