"""Layers of any library as two pure functions of collections of variables, `init` and `apply`.

Variables are nested dicts by collection and path, like those of Linen; values may be in boxes of
axis metadata. Each library has one `Model` for its layers, and each way of writing models in Weft
has one layer that holds a `Model`, so the number of adapters is the number of libraries.

`model_of` recognizes the library of an object by its class's module, without importing the library.
"""

import abc
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from weft import errors
from weft.config import (
    REQUIRED,
    ClassConfigBase,
    FunctionConfigBase,
    InMemory,
    InstantiableConfig,
)
from weft.core import filters, meta
from weft.nnx.rngs import Rngs
from weft.nnx.state import path_text
from weft.nnx.versions import StaticValue
from weft.typing import Leaf, PyTree, T

Library = Any  # a module of Python that need not be installed
Layer = Any
"""A layer of a library, a class of layers, or a function that makes one; they share no type."""
Path = tuple[Any, ...]
Variables = dict[str, Any]
"""Nested dicts of values by collection and path; values may be in boxes."""
Keys = Mapping[str, jax.Array]
"""PRNG keys by stream; `default` replaces missing streams."""
RngsLike = Rngs | Keys | jax.Array | int | None
Method = str | Callable[..., Any] | None
"""A method, its name, or a function of the layer; None for a call of the layer itself."""


class Model(abc.ABC):
    """Base class for layers of a library, as pure functions.

    Models with equal attributes are equal, so that they share traces.

    Attributes:
        quantizes: whether linear layers follow `weft.functional.default_dot_general`.
    """

    quantizes = False

    @property
    def name(self) -> str:
        """Name of the layer in messages."""
        return type(self).__name__

    @abc.abstractmethod
    def init(
        self,
        rngs: Keys,
        *args: PyTree,
        training: bool | None = None,
        method: str | None = None,
        **kwargs: PyTree,
    ) -> Variables:
        """Returns the variables of the layer, for a call with the given arguments.

        `training` is None to leave the mode; `method` names what to call, by default the layer.
        """

    def init_with_output(
        self, rngs: Keys, *args: PyTree, **kwargs: PyTree
    ) -> tuple[Any, Mapping[str, Any]]:
        """Returns a call's result and the variables that it makes; arguments as for `init`."""
        variables = self.init(rngs, *args, **kwargs)
        out, _ = self.apply(variables, *args, rngs=rngs, mutable=True, **kwargs)
        return out, variables

    @abc.abstractmethod
    def apply(
        self,
        variables: Mapping[str, Any],
        *args: PyTree,
        rngs: Keys,
        mutable: filters.Filter,
        training: bool | None = None,
        method: str | None = None,
        **kwargs: PyTree,
    ) -> tuple[Any, Variables]:
        """Calls the layer on its variables, whose values may be in boxes; see `init`.

        Returns the call's result, and the new or changed entries of mutable collections.
        """

    def trains(self, collection: str) -> bool:
        """Returns whether the values of a collection are trained; all others are state."""
        return collection == "params"

    def has_method(self, name: str) -> bool:
        """Returns whether the layer has that method, as far as known before it is made."""
        layer = getattr(self, "module", None)
        if isinstance(layer, _ConfigFactory):
            layer = layer.factory
        return callable(getattr(layer, name, None))

    def _key(self) -> StaticValue:
        attributes: list[tuple[str, Any]] = []
        for name, value in vars(self).items():
            if not name.startswith("_"):
                attributes.append((name, value))
        return StaticValue((type(self), tuple(attributes)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


def import_library(name: str, extra: str) -> Library:
    """Imports and returns a library.

    Raises MissingLibraryError if it is missing; the message names the `extra` to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise errors.MissingLibraryError(
            f"layers of {name} are used, and it is not installed ({error}); install it: "
            f"pip install {extra}"
        ) from error


def single_key(rngs: Keys, *names: str) -> Any:
    """Returns the key for a layer that takes a single one, or None.

    `names` are the streams to try first.
    """
    for name in (*names, *rngs):
        if name in rngs:
            return rngs[name]
    return None


def parameter_names(fn: Callable[..., Any]) -> set[str]:
    """Returns the names of a function's keyword parameters; none if they are unknown."""
    try:
        # The signature of a class may be that of its metaclass, which says nothing.
        called = fn.__init__ if isinstance(fn, type) else fn
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):
        return set()
    names: set[str] = set()
    for name, parameter in parameters.items():
        if parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            names.add(name)
    return names


# The names of parameters for the mode, and the value of each in training.
_VALUES_IN_TRAINING = {
    "training": True,
    "train": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}


def add_mode(
    fn: Callable[..., Any], kwargs: Mapping[str, Any], training: bool | None
) -> dict[str, Any]:
    """Returns the arguments with the training mode added, under the names that libraries use.

    Args:
        fn: takes some of `training`, `train`, `is_training`, `deterministic` and
            `use_running_average`.
        kwargs: the arguments; modes already set are kept.
        training: whether this is training; None adds nothing.
    """
    if training is None:
        return dict(kwargs)
    accepted = parameter_names(fn)
    flags: dict[str, bool] = {}
    for name, value_in_training in _VALUES_IN_TRAINING.items():
        if name in accepted:
            flags[name] = (
                value_in_training if training else not value_in_training
            )
    return {**flags, **kwargs}


def resolve_method(
    layer: Layer, method: Method, name: str
) -> Callable[..., Any]:
    """Returns the layer itself, its method of that name, or a function of the layer.

    Raises LayerMethodError if the layer has no such method.
    """
    if method is None or method == "__call__":
        if callable(layer):
            return layer
        method = "__call__"
    if callable(method):
        return lambda *args, **kwargs: method(layer, *args, **kwargs)
    bound_method = getattr(layer, method, None)
    if not callable(bound_method):
        public_methods: list[str] = []
        for attribute in dir(type(layer)):
            if attribute[0] != "_" and callable(
                getattr(type(layer), attribute)
            ):
                public_methods.append(attribute)
        raise errors.LayerMethodError(
            f"{name} has no method {method!r}; there are: {', '.join(public_methods) or 'none'}."
        )
    return bound_method


def rebox(old: Leaf, value: T) -> T | meta.AxisMetadata:
    """Puts a value into the box of the one that it replaces, if that has a box."""
    if meta.is_axis_metadata(old) and not meta.is_axis_metadata(value):
        return old.replace_boxed(value)
    return value


def check_variables(
    name: str,
    expected: Mapping[Path, Any],
    values: Mapping[Path, Any],
    shapes: bool = True,
) -> None:
    """Checks that values match a layer's variables, objects with a shape by collection and path.

    Raises LayerVariablesError if one is missing, or has another shape.
    """
    for path, variable in expected.items():
        if path not in values:
            paths = ", ".join(map(path_text, values)) or "none"
            raise errors.LayerVariablesError(
                f"{name} has a variable {path_text(path)!r}, which was not given; there are: "
                f"{paths}. Give it the variables that its `init` made."
            )
        shape = getattr(values[path], "shape", None)
        if not shapes or shape is None:
            continue
        if tuple(shape) != tuple(variable.shape):
            raise errors.LayerVariablesError(
                f"the variable {path_text(path)!r} of {name} has the shape {tuple(shape)}; "
                f"expected {tuple(variable.shape)}. The variables are those of another layer."
            )


_ADAPTERS = {
    "weft.linen.": "weft.interop.linen:LinenModel",
    "weft.nnx.": "weft.interop.nnx:NNXModel",
    "weft.hierarchy.": "weft.interop.hierarchy:HierarchyModel",
    "flax.linen.": "weft.interop.flax:FlaxLinenModel",
    "flax.nnx.": "weft.interop.flax:FlaxNNXModel",
    "equinox.": "weft.interop.equinox_haiku:EquinoxModel",
    "haiku.": "weft.interop.equinox_haiku:HaikuModel",
}


def adapter_of(x: Layer) -> str:
    """Returns the module of the `Model` for a layer or class of layers; empty if there is none."""
    if isinstance(x, tuple) and len(x) == 2 and type(x) is tuple:
        x = x[0]  # a layer and its state
    # The root of the classes of a library comes first: a module of one may hold another's.
    layer_class = x if isinstance(x, type) else type(x)
    for base in reversed(layer_class.__mro__):
        for prefix, adapter in _ADAPTERS.items():
            if f"{base.__module__}.".startswith(prefix):
                return adapter
    return ""


def model_of(x: Layer, *args: PyTree, **kwargs: PyTree) -> Model:
    """Returns the `Model` of a layer.

    Args:
        x: a layer of Linen, NNX, Flax, Equinox or Haiku, a class of layers of these or the
            hierarchy, or a config that makes one. Also a hierarchy config, a pair of an Equinox
            layer and its state, a result of `haiku.transform`, or a `Model`.

    Raises UnknownLayerError if `x` is something else, or arguments were given without a class.
    """
    if (args or kwargs) and not isinstance(x, type):
        raise errors.UnknownLayerError(
            f"{x!r} is not a class, but was given the arguments {args} and {kwargs}; "
            "pass a class and its arguments, or a layer alone."
        )
    if isinstance(x, InMemory):
        x = x.value
    if isinstance(x, Model):
        return x
    adapter = adapter_of(x)
    if adapter:
        return _load_adapter(adapter)(x, *args, **kwargs)
    if isinstance(x, ClassConfigBase | FunctionConfigBase):
        return _config_model(x)
    if isinstance(x, InstantiableConfig):
        return model_of(x.instantiate())
    raise errors.UnknownLayerError(
        f"{x!r} is not a layer of a known library; pass a module of Linen or NNX, of "
        "Weft or Flax, a config of a hierarchy layer, a module of Equinox, a module or "
        "transformed function of Haiku, or derive from weft.interop.Model."
    )


_FactoryConfig = ClassConfigBase[Any] | FunctionConfigBase[Any]


class _ConfigFactory:
    """Function that makes the module of a config, complete except for its `rngs`.

    Attributes:
        factory: the class or function that the config calls.
    """

    def __init__(self, config: _FactoryConfig):
        self._config = config
        self.factory = (
            config.klass if isinstance(config, ClassConfigBase) else config.fn
        )
        self.__name__ = self.factory.__name__

    def __call__(self, *, rngs: Rngs) -> Layer:
        return self._config.instantiate(rngs=rngs)


def _config_model(config: _FactoryConfig) -> Model:
    lacks_rngs = "rngs" in config.keys() and config.rngs in (None, REQUIRED)  # noqa: SIM118
    if lacks_rngs:
        maker = _ConfigFactory(config)
        # Nothing but NNX gives streams by this name; a function that takes them makes its modules.
        adapter = _ADAPTERS["weft.nnx."]
        if isinstance(maker.factory, type):
            adapter = adapter_of(maker.factory)
        if adapter:
            return _load_adapter(adapter)(maker)
    return model_of(config.instantiate())


def _load_adapter(adapter: str) -> Callable[..., Model]:
    module, _, name = adapter.partition(":")
    return getattr(importlib.import_module(module), name)
