"""What a layer of any library is to the others: two pure functions of collections of variables.

`init` makes the variables, `apply` takes them and gives the result together with what has changed.
Variables are nested dicts by collection and path, as those of Linen, and a value can be in a box of
axis metadata. Each library has one `Model` that says so of its layers, and each way of writing in
Weft has one layer that holds a `Model`: so any layer works in any model, with as many adapters as
there are libraries.
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
    """A layer of some library, as pure functions; derive from it to use a library of your own.

    Models of equal attributes are equal, so that what was traced with one serves all.
    """

    @property
    def name(self) -> str:
        """What the layer is called in messages."""
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
        """The variables of the layer.

        Args:
            rngs: PRNG keys by stream; `default` stands in for those that are not there.
            *args: of the call for which they are made.
            training: whether this is a part of training; None leaves the layer as it is.
            method: what is called, by default the layer itself.
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
            variables: as `init` makes them, with values that may be in boxes.
            *args: of the call.
            rngs: see `init`.
            mutable: the collections that may change.
            training: see `init`.
            method: see `init`.
            **kwargs: of the call.

        Returns:
            What the call returns, and of the collections that may change those entries that are
            new or may have changed.
        """

    def trains(self, collection: str) -> bool:
        """Whether what a collection holds is trained; all else is the layer's state.

        Args:
            collection: its name.
        """
        return collection == "params"

    def has_method(self, name: str) -> bool:
        """Whether the layer has a method of a name, as far as this is known before it is made.

        Args:
            name: of the method.
        """
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
    """A library that is imported when it is needed.

    Args:
        name: of the module.
        extra: what is to be installed.

    Raises:
        MissingLibraryError: if it is not there.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingLibraryError(
            f"layers of {name} are used, and it is not installed ({error}); install it: "
            f"pip install {extra}"
        ) from error


def one_key(rngs: Mapping[str, Any], *names: str) -> Any:
    """The key for a layer that takes a single one, None if there is none.

    Args:
        rngs: keys by stream.
        *names: the streams that are asked first.
    """
    return next((rngs[n] for n in (*names, *rngs) if n in rngs), None)


def parameters_of(fn: Callable[..., Any]) -> set[str]:
    """The names of a function's parameters that can be given by name; none if they are unknown."""
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
    """Arguments with those that say whether this is training, under the names that libraries use.

    Args:
        fn: takes some of `training`, `train`, `is_training`, `deterministic` and
            `use_running_average`.
        kwargs: the arguments; what is among them already stays.
        training: whether this is training; None adds nothing.
    """
    if training is None:
        return dict(kwargs)
    taken = parameters_of(fn)
    said = {name: (training == sense) for name, sense in _MODES.items() if name in taken}
    return {**said, **kwargs}


def method_of(layer: Any, method: Any, name: str) -> Callable[..., Any]:
    """What is called: the layer itself, a method by its name, or a function of the layer.

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
    """The values of nested mappings by path."""
    found: dict[Path, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found.update(flat(value, (*path, name)))
        else:
            found[(*path, name)] = value
    return found


def nested(values: Mapping[Path, Any]) -> dict[Any, Any]:
    """Nested dicts of values by path; the inverse of `flat`."""
    tree: dict[Any, Any] = {}
    for (*above, name), value in values.items():
        at = tree
        for part in above:
            at = at.setdefault(part, {})
        at[name] = value
    return tree


def shown(path: Path) -> str:
    """A path in messages."""
    return "/".join(map(str, path))


def boxed_like(before: Any, value: Any) -> Any:
    """A value in the box in which the one before it was."""
    if is_axis_metadata(before) and not is_axis_metadata(value):
        return before.replace_boxed(value)
    return value


def check_same_paths(
    name: str, wanted: Mapping[Path, Any], given: Mapping[Path, Any], shapes: bool = True
) -> None:
    """Compares the variables that a layer has with those that it is given.

    Args:
        name: of the layer.
        wanted: something with a shape, by collection and path.
        given: the values.
        shapes: whether shapes are compared.

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
