"""Layers of any library as two pure functions of collections of variables, `init` and `apply`.

Variables are nested dicts by collection and path, like those of Linen; values may be in boxes of
axis metadata. Each library has one `Model` for its layers, and each way of writing models in Weft
has one layer that holds a `Model`, so the number of adapters is the number of libraries.
"""

import abc
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from weft.core.filters import Filter
from weft.core.meta import is_axis_metadata
from weft.errors import LayerMethodError, LayerVariablesError, MissingLibraryError
from weft.nnx.structure import Fixed

Path = tuple[Any, ...]
Variables = dict[str, Any]


class Model(abc.ABC):
    """Base class for layers of a library, as pure functions.

    Models with equal attributes are equal, so that they share traces.
    """

    @property
    def name(self) -> str:
        """Name of the layer in messages."""
        return type(self).__name__

    @abc.abstractmethod
    def init(
        self,
        rngs: Mapping[str, Any],
        *args: Any,
        training: bool | None = None,
        method: str | None = None,
        **kwargs: Any,
    ) -> Variables:
        """Returns the variables of the layer, for a call with the given arguments.

        Args:
            rngs: PRNG keys by stream; `default` replaces missing streams.
            *args: of the call.
            training: whether this is part of training; None does not set the mode.
            method: name of the method to call, by default the layer itself.
            **kwargs: of the call.
        """

    @abc.abstractmethod
    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: Mapping[str, Any],
        mutable: Filter,
        training: bool | None = None,
        method: str | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Variables]:
        """Calls the layer on its variables.

        Args:
            variables: as returned by `init`; values may be in boxes.
            *args: of the call.
            rngs, training, method: see `init`.
            mutable: the collections that may change.
            **kwargs: of the call.

        Returns:
            The call's result, and the new or changed entries of mutable collections.
        """

    def trains(self, collection: str) -> bool:
        """Returns whether the values of a collection are trained; all others are state."""
        return collection == "params"

    def has_method(self, name: str) -> bool:
        """Returns whether the layer has that method, as far as known before it is made."""
        layer = getattr(self, "module", None)
        return callable(getattr(getattr(layer, "made", layer), name, None))

    def _key(self) -> Fixed:
        attributes = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        return Fixed((type(self), tuple(attributes.items())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


def library(name: str, extra: str) -> Any:
    """Imports and returns a library.

    Raises:
        MissingLibraryError: if it is missing; the message names the `extra` to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingLibraryError(
            f"layers of {name} are used, and it is not installed ({error}); install it: "
            f"pip install {extra}"
        ) from error


def one_key(rngs: Mapping[str, Any], *names: str) -> Any:
    """Returns the key for a layer that takes a single one, or None.

    `names` are the streams to try first.
    """
    return next((rngs[n] for n in (*names, *rngs) if n in rngs), None)


def parameters_of(fn: Callable[..., Any]) -> set[str]:
    """Returns the names of a function's keyword parameters; none if they are unknown."""
    try:
        # The signature of a class may be that of its metaclass, which says nothing.
        called = fn.__init__ if isinstance(fn, type) else fn
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


_MODES = {
    "training": True,
    "train": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}


def with_mode(
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
    taken = parameters_of(fn)
    said = {name: (training == sense) for name, sense in _MODES.items() if name in taken}
    return {**said, **kwargs}


def method_of(layer: Any, method: Any, name: str) -> Callable[..., Any]:
    """Returns the layer itself, its method of that name, or a function of the layer.

    Raises:
        LayerMethodError: if the layer has no such method.
    """
    if method is None or method == "__call__":
        if callable(layer):
            return layer
        method = "__call__"
    if callable(method):
        return lambda *args, **kwargs: method(layer, *args, **kwargs)
    found = getattr(layer, method, None)
    if not callable(found):
        public = [n for n in dir(type(layer)) if n[0] != "_" and callable(getattr(type(layer), n))]
        raise LayerMethodError(
            f"{name} has no method {method!r}; there are: {', '.join(public) or 'none'}."
        )
    return found


# Nested dicts and their paths.


def flat(tree: Mapping[Any, Any], path: Path = ()) -> dict[Path, Any]:
    """Returns the values of nested mappings by path."""
    found: dict[Path, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found.update(flat(value, (*path, name)))
        else:
            found[(*path, name)] = value
    return found


def nested(values: Mapping[Path, Any]) -> dict[Any, Any]:
    """Inverts `flat`."""
    tree: dict[Any, Any] = {}
    for (*above, name), value in values.items():
        at = tree
        for part in above:
            at = at.setdefault(part, {})
        at[name] = value
    return tree


def shown(path: Path) -> str:
    """Formats a path for messages."""
    return "/".join(map(str, path))


def boxed_like(before: Any, value: Any) -> Any:
    """Puts a value into the box of the one before it, if any."""
    if is_axis_metadata(before) and not is_axis_metadata(value):
        return before.replace_boxed(value)
    return value


def check_same_paths(
    name: str, wanted: Mapping[Path, Any], given: Mapping[Path, Any], shapes: bool = True
) -> None:
    """Checks that given variables match a layer's.

    Args:
        name: of the layer.
        wanted: objects with a shape, by collection and path.
        given: the values.
        shapes: whether to compare shapes.

    Raises:
        LayerVariablesError: if one is missing, or has another shape.
    """
    for path, value in wanted.items():
        if path not in given:
            there = ", ".join(map(shown, given)) or "none"
            raise LayerVariablesError(
                f"{name} has a variable {shown(path)!r}, which was not given; there are: {there}. "
                "Give it the variables that its `init` made."
            )
        new = getattr(given[path], "shape", None)
        if shapes and new is not None and tuple(new) != tuple(value.shape):
            raise LayerVariablesError(
                f"the variable {shown(path)!r} of {name} has the shape {tuple(new)}; expected "
                f"{tuple(value.shape)}. The variables are those of another layer."
            )
