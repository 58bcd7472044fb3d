"""Layers of Linen in other models, and layers of other libraries in models of Linen."""

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax

from weft import errors, linen
from weft.core.filters import Filter
from weft.core.flat_dict import flatten_dict, path_aware_map, unflatten_dict
from weft.interop import models
from weft.interop.models import Keys, Layer, Method, Model, Path, Variables
from weft.linen.state import without_parent
from weft.typing import Leaf, PyTree


def linen_streams(rngs: Keys) -> dict[str, Any]:
    """Returns the streams for a Linen module; `default` replaces a missing `params`."""
    streams = dict(rngs)
    if "default" in streams:
        default = streams.pop("default")
        streams.setdefault("params", default)
    return streams


def _completed(module: Layer) -> Layer:
    """Returns a module with what its constructor adds to its fields.

    One that was read from the text of a config has its fields alone, and so have modules in them.
    """
    if "_state" in vars(module):
        return module

    def complete(x: Leaf) -> Leaf:
        return _completed(x) if _is_module(x) else x

    fields: dict[str, Any] = {}
    for field in dataclasses.fields(module):
        if field.init and field.name in vars(module):
            value = vars(module)[field.name]
            fields[field.name] = jax.tree.map(
                complete, value, is_leaf=_is_module
            )
    return type(module)(**fields)


def _is_module(x: Leaf) -> bool:
    is_instance = dataclasses.is_dataclass(x) and not isinstance(x, type)
    return is_instance and hasattr(x, "init_with_output")


class LinenModel(Model):
    """A Linen module, or a class of modules with its arguments."""

    quantizes = True

    def __init__(self, module: Layer, *args: PyTree, **kwargs: PyTree):
        with self._without_parent():
            if isinstance(module, type):
                module = module(*args, **kwargs)
            if not isinstance(module, self._base_class()):
                raise errors.UnknownLayerError(
                    f"a module of Linen was to be used, and a {type(module).__name__} was given; "
                    "give one, or let weft.interop.model_of say what it is."
                )
            self.module = _completed(module).clone(parent=None)

    @staticmethod
    def _base_class() -> type:
        return linen.Module

    @staticmethod
    def _without_parent() -> AbstractContextManager[None]:
        return without_parent()

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def init(self, rngs, *args, **kwargs):
        _, variables = self.init_with_output(rngs, *args, **kwargs)
        return variables

    def init_with_output(
        self, rngs, *args, training=None, method=None, **kwargs
    ):
        kwargs = self._arguments(method, kwargs, training)
        with self._without_parent():
            out, variables = self.module.init_with_output(
                linen_streams(rngs), *args, **kwargs
            )
        return out, self._from_library(variables)

    def apply(
        self,
        variables,
        *args,
        rngs,
        mutable,
        training=None,
        method=None,
        **kwargs,
    ):
        kwargs = self._arguments(method, kwargs, training)
        library_variables = self._to_library(variables)
        with self._without_parent():
            out = self.module.apply(
                library_variables,
                *args,
                rngs=linen_streams(rngs),
                mutable=self._library_filter(mutable),
                **kwargs,
            )
        if mutable is False:
            return out, {}
        out, library_variables = out
        old_values = flatten_dict(variables)
        changed: dict[Path, Any] = {}
        for path, value in flatten_dict(
            self._from_library(library_variables)
        ).items():
            if path not in old_values or old_values[path] is not value:
                changed[path] = value
        return out, unflatten_dict(changed)

    def _arguments(
        self, method: Method, kwargs: dict[str, Any], training: bool | None
    ) -> dict[str, Any]:
        called = models.resolve_method(self.module, method, self.name)
        if method is None:
            # The signature of a module itself is that of its `__call__`.
            called = getattr(self.module, "__call__", called)  # noqa: B004
        else:
            kwargs = {"method": method, **kwargs}
        return models.add_mode(called, kwargs, training)

    def _library_filter(self, mutable: Filter) -> Filter:
        return mutable

    def _to_library(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        return variables

    def _from_library(self, variables: Mapping[str, Any]) -> Variables:
        return dict(variables)


class InLinen(linen.Module):
    """A layer of any library as a module of Linen.

    Attributes:
        training: whether it is called in training mode; None does not set the mode.
    """

    model: Any
    training: bool | None = None

    @linen.compact
    def __call__(
        self,
        *args: PyTree,
        training: bool | None = None,
        method: Method = None,
        **kwargs: PyTree,
    ) -> PyTree:
        """Calls the layer, or its method named `method`; `training` overrides the attribute."""
        scope: Any = self.scope
        if training is None:
            training = self.training
        options = {"training": training, "method": method, **kwargs}
        variables = self.variables
        if self.is_initializing() and not any(variables.values()):
            variables = self.model.init(draw_keys(self), *args, **options)
            store_variables(self, variables)
        out, changed = self.model.apply(
            variables,
            *args,
            rngs=draw_keys(self),
            mutable=scope.mutable,
            **options,
        )
        if not self.is_initializing():
            store_variables(self, rebox_all(variables, changed))
        return out


def draw_keys(module: linen.Module) -> dict[str, Any]:
    """Returns a new key of each PRNG stream of a bound module."""
    scope: Any = module.scope
    return {name: module.make_rng(name) for name in scope.rngs}


def store_variables(module: linen.Module, variables: Mapping[str, Any]) -> None:
    """Sets variables of a bound module, those of mutable collections."""
    for collection, entries in variables.items():
        if module.is_mutable_collection(collection):
            for name, value in entries.items():
                module.put_variable(collection, name, value)


def rebox_all(
    variables: Mapping[str, Any], changed: Mapping[str, Any]
) -> Variables:
    """Returns changed variables in the boxes in which they were."""
    boxes = flatten_dict(variables)
    return path_aware_map(
        lambda path, value: models.rebox(boxes.get(path), value), changed
    )


def as_linen(
    x: Layer,
    /,
    *args: PyTree,
    name: str | None = None,
    training: bool | None = None,
    **kwargs: PyTree,
) -> linen.Module:
    """Returns a layer of any library as a module of Linen.

    Its variables are those of the layer, with their axis metadata, in `params` and the layer's
    other collections. Keys come from the streams of Linen.

    Args:
        x: the layer, see `weft.interop.model_of`, or a class of layers. Modules of Linen are
            returned unchanged. If the layer holds arrays itself, `init` copies them.
        training: whether the layer is in training mode, a default for calls; None sets no mode.

    Raises UnknownLayerError if the library of `x` is unknown.

    >>> class Model(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return as_linen(nnx.Linear, 3, 2, name="head")(x)
    >>> variables = Model().init(jax.random.key(0), jnp.ones((1, 3)))
    >>> jax.tree.map(jnp.shape, variables)
    {'params': {'head': {'bias': (2,), 'kernel': (3, 2)}}}
    """
    if isinstance(x, linen.Module) and not (args or kwargs):
        return x if name is None else x.copy(name=name)
    if isinstance(x, type) and issubclass(x, linen.Module):
        if name is not None:
            kwargs = {**kwargs, "name": name}
        return x(*args, **kwargs)
    return InLinen(models.model_of(x, *args, **kwargs), training, name=name)
