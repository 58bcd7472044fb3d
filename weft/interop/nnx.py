"""Layers of NNX in other models, and layers of other libraries in models of NNX."""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax

from weft import nnx
from weft.core.filters import DenyList, Filter, in_filter
from weft.core.known import known_or_shape
from weft.core.meta import global_mesh_defined, unbox
from weft.errors import InvalidRngError
from weft.interop.bridge.to_nnx import ToNNX, initializing
from weft.interop.bridge.variables import collection_of, to_linen_var, to_nnx_var
from weft.interop.models import (
    Model,
    Path,
    Variables,
    check_same_paths,
    flat,
    method_of,
    nested,
    one_key,
    parameters_of,
    shown,
)
from weft.interop.recognition import model_of
from weft.linen.running import alone
from weft.nnx.observing import visit

__all__ = ["InNNX", "NNXModel", "as_nnx"]


class _Parts(NamedTuple):
    """A module without its values.

    Attributes:
        graphdef: its description.
        leaves: its variables and arrays by path, with shapes in place of values.
        keys: the values in PRNG streams, by path.
    """

    graphdef: Any
    leaves: dict[Path, Any]
    keys: dict[Path, Any]


class NNXModel(Model):
    """An NNX module.

    Args:
        module: the module, whose values are the initial ones; or a class or function that makes it.
        *args: for a class.
        **kwargs: for a class, except `rngs`.

    Attributes:
        takes_rngs: whether the class receives the streams as `rngs`.
        abstract: whether to skip computing initial values where values are given.
        metadata_fn: converts a variable to its entry in a collection.
    """

    nnx: Any = nnx

    def __init__(self, module: Any, *args: Any, **kwargs: Any):
        self.module, self.args, self.kwargs = module, args, kwargs
        self.takes_rngs = "rngs" not in kwargs and "rngs" in parameters_of(module)
        self.abstract = True
        self.metadata_fn: Any = to_linen_var

    @property
    def name(self) -> str:
        of_class = self.module if isinstance(self.module, type) else type(self.module)
        return getattr(self.module, "__name__", of_class.__name__)

    @property
    def _is_made(self) -> bool:
        return isinstance(self.module, self.nnx.Pytree)

    def trains(self, collection):
        try:
            kind = self.nnx.variable_type_from_name(collection)
        except ValueError:
            return False
        return issubclass(kind, self.nnx.Param)

    # Making it.

    def make(self, rngs: Mapping[str, Any]) -> Any:
        """Returns the module with its initial values."""
        if self._is_made:
            made = self.nnx.clone(self.module)
            keys = {tag: rngs[tag] for tag in self._tags(made) if tag in rngs}
            if "default" in rngs:
                keys = {**dict.fromkeys(self._tags(made), rngs["default"]), **keys}
            self.nnx.reseed(made, policy="match_shape", **keys)
            return made
        streams = {"rngs": self.nnx.Rngs(**rngs)} if self.takes_rngs else {}
        with alone():
            return self.module(*self.args, **self.kwargs, **streams)

    def type_made(self, rngs: Mapping[str, Any]) -> type:
        """Returns the class of the module."""
        return self._described(rngs).graphdef.root.type

    def _tags(self, module: Any) -> set[str]:
        found = (x for _, x in self.nnx.iter_graph(module))
        return {x.tag for x in found if isinstance(x, self.nnx.RngStream)}

    def _is_key(self, leaf: Any) -> bool:
        return isinstance(leaf, self.nnx.RngState)

    def collections(self, module: Any) -> dict[Path, Any]:
        """Returns a module's variables and arrays, by collection and path, without PRNG streams."""
        return self._by_collection(self._leaves(module)[1])

    def _leaves(self, module: Any) -> tuple[Any, dict[Path, Any]]:
        graphdef, state = self.nnx.split(module)
        return graphdef, dict(self.nnx.to_flat_state(state))

    def _by_collection(self, leaves: Mapping[Path, Any]) -> dict[Path, Any]:
        return {
            (self._collection(leaf), *path): leaf
            for path, leaf in leaves.items()
            if not self._is_key(leaf)
        }

    def _collection(self, leaf: Any) -> str:
        return collection_of(type(leaf)) if isinstance(leaf, nnx.Variable) else "arrays"

    def boxed(self, leaf: Any) -> Any:
        """Returns a collection's entry for a variable or array."""
        if not isinstance(leaf, self.nnx.Variable):
            return leaf
        return leaf.get_raw_value() if self.metadata_fn is None else self.metadata_fn(leaf)

    def _described(self, rngs: Mapping[str, Any]) -> _Parts:
        """Returns the module without computing values other than its streams."""
        found: list[Any] = []

        def build(rngs: Mapping[str, Any]) -> list[Any]:
            graphdef, leaves = self._leaves(self.make(rngs))
            shapes = {path: self._with(leaf, _shape_of(leaf)) for path, leaf in leaves.items()}
            found[:] = [graphdef, shapes]
            return [x.get_raw_value() for x in leaves.values() if self._is_key(x)]

        absent = jax.eval_shape(lambda: jax.random.key(0))
        if self._is_made and self._tags(self.module) == {"default"}:
            absent = one_key(rngs, "dropout") if rngs else absent  # a stream for all purposes
        streams = {"default": absent, **rngs}
        if not (self.abstract or self._is_made):
            streams = {"default": jax.random.key(0), **rngs}
            values = build(streams)
        else:
            values = known_or_shape(build, streams)
        paths = [path for path, leaf in found[1].items() if self._is_key(leaf)]
        return _Parts(found[0], found[1], dict(zip(paths, values, strict=True)))

    def _with(self, leaf: Any, value: Any) -> Any:
        """Returns a variable or array like another, with another value."""
        if not isinstance(leaf, self.nnx.Variable):
            return value
        return type(leaf).from_metadata(value, leaf.get_metadata())

    def with_values(
        self, variables: Mapping[str, Any], rngs: Mapping[str, Any], mutable: Filter
    ) -> tuple[Any, dict[Path, Any], dict[Path, Any]]:
        """Returns the module with given values, all its values, and those that were newly made.

        Args:
            variables: the values.
            rngs: keys by stream; drawing from another stream is an error.
            mutable: the collections whose missing values may be made.

        Raises:
            LayerVariablesError: if a value is missing, or a parameter has another shape.
        """
        parts, given = self._described(rngs), flat(variables)
        wanted = self._by_collection(parts.leaves)
        missing = {path: leaf for path, leaf in wanted.items() if path not in given}
        made: dict[Path, Any] = {}
        if missing and all(in_filter(mutable, path[0]) for path in missing):
            first = self.collections(self.make(rngs))
            made = {path: first[path] for path in missing}
        values = {path: unbox(x) for path, x in given.items()}
        values.update((path, _raw(x)) for path, x in made.items())
        check_same_paths(self.name, wanted, values, shapes=False)
        parameters = {p: _raw(x) for p, x in wanted.items() if p[0] == "params"}
        with_shapes = {p: x for p, x in parameters.items() if hasattr(x, "shape")}
        check_same_paths(self.name, with_shapes, values)
        leaves = {
            path: self._stream_part(leaf, parts.keys[path], rngs)
            if self._is_key(leaf)
            else self._with(leaf, values[self._collection(leaf), *path])
            for path, leaf in parts.leaves.items()
        }
        module = self.nnx.merge(parts.graphdef, self.nnx.from_flat_state(list(leaves.items())))
        self._attach(module, {path: given[path] for path in given if path not in wanted})
        kept = {path: values[path] for path in self.collections(module) if path in values}
        return module, kept, made

    def _stream_part(self, leaf: Any, value: Any, rngs: Mapping[str, Any]) -> Any:
        """Returns a part of a PRNG stream; streams without a known key refuse to draw."""
        if not isinstance(value, jax.ShapeDtypeStruct):
            return self._with(leaf, value)
        there, name = ", ".join(map(repr, rngs)) or "none", self.name

        def refuse(*_: Any) -> Any:
            raise InvalidRngError(
                f"{name} draws a key from a PRNG stream that it was not given; it was given: "
                f"{there}. Give one for each stream that it draws from, such as "
                "rngs={'dropout': key}, or let the layer not draw."
            )

        with jax.ensure_compile_time_eval():
            key = jax.random.split(jax.random.key(0), value.shape)
        metadata = {**leaf.get_metadata(), "on_get_value": refuse}
        return type(leaf).from_metadata(key, metadata)

    def _attach(self, module: Any, extra: Mapping[Path, Any]) -> None:
        """Adds values to a module that an earlier call sowed or made."""
        places, kinds = dict(self.nnx.iter_graph(module)), (self.nnx.Pytree, ToNNX)
        strays = []
        for (col, *path), value in extra.items():
            ends = [n for n in range(len(path)) if isinstance(places.get(tuple(path[:n])), kinds)]
            holder = places[tuple(path[: ends[-1]])] if ends else None
            if ends and ends[-1] == len(path) - 1:
                setattr(holder, path[-1], self._new(col, value))
            elif isinstance(holder, ToNNX):
                holder._hold(tuple(path[ends[-1] :]), self._new(col, value))
            else:
                strays.append(shown((col, *path)))
        if strays:
            warnings.warn(
                f"{self.name} was given variables that it has no place for: {', '.join(strays)}.",
                stacklevel=6,
            )

    def _new(self, col: str, value: Any) -> Any:
        return to_nnx_var(col, value) if col != "arrays" else unbox(value)

    # Using it.

    def init(self, rngs, *args, training=None, method=None, **kwargs):
        module = self.make(rngs)
        self.begin(module, args, kwargs, method, training)
        leaves = self.collections(module)
        return nested({path: self.boxed(leaf) for path, leaf in leaves.items()})

    def begin(
        self, module: Any, args: Any, kwargs: Any, method: Any, training: bool | None = None
    ) -> None:
        """Makes the variables of other libraries' layers in a new module, by calling it.

        All other changes of the call are reverted.

        Args:
            module: as returned by `make`.
            args: of the call.
            kwargs: of the call, by name.
            method: the method to call.
            training: whether this is part of training; None does not set the mode.
        """
        graph = [x for _, x in nnx.iter_graph(module)]
        if all(x._held() for x in graph if isinstance(x, ToNNX)):
            return
        before = [(x, x.get_raw_value()) for x in graph if isinstance(x, nnx.Variable)]
        with initializing():
            self.call(module, args, kwargs, method, training)
        for variable, value in before:
            variable.set_raw_value(value)
        there = {id(variable) for variable, _ in before}
        nnx.pop(module, lambda _, x: isinstance(x, nnx.Intermediate) and id(x) not in there)

    def apply(self, variables, *args, rngs, mutable, training=None, method=None, **kwargs):
        module, before, made = self.with_values(variables, rngs, mutable)
        out = self.call(module, args, kwargs, method, training)
        return out, self.changes(
            module, {p: v for p, v in before.items() if p not in made}, mutable
        )

    def call(
        self, module: Any, args: Any, kwargs: Any, method: Any, training: bool | None = None
    ) -> Any:
        """Calls the module or one of its methods, in a mode."""
        if training is not None and isinstance(module, self.nnx.Module):
            module.train() if training else module.eval()
        if isinstance(module, nnx.Pytree):
            visit(module)
        with alone():
            return method_of(module, method, self.name)(*args, **kwargs)

    def changes(self, module: Any, before: Mapping[Path, Any], mutable: Filter) -> Variables:
        """Returns a module's values in mutable collections that differ from before."""
        return nested(
            {
                path: self.boxed(leaf)
                for path, leaf in self.collections(module).items()
                if in_filter(mutable, path[0])
                and (path not in before or before[path] is not _raw(leaf))
            }
        )


def _raw(leaf: Any) -> Any:
    return leaf.get_raw_value() if hasattr(leaf, "get_raw_value") else leaf


def _shape_of(leaf: Any) -> Any:
    def shape(x: Any) -> Any:
        is_array = hasattr(x, "shape") and hasattr(x, "dtype")
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array else x

    return jax.tree.map(shape, _raw(leaf))


class InNNX(ToNNX):
    """A layer of any library as a module of NNX.

    `train()` and `eval()` of the surrounding model set its mode.

    Args:
        model: the layer.
        rngs: the streams from which its keys are drawn.
        mutable: the collections that a call may change.

    Attributes:
        deterministic: the opposite of training mode; None does not set the mode.
    """

    def __init__(self, model: Model, rngs: Any = None, *, mutable: Filter = True):
        super().__init__(model, rngs)
        self.to_nnx__mutable = mutable
        self.deterministic: bool | None = None

    def lazy_init(self, *args: Any, rngs: Any = None, **kwargs: Any) -> Self:
        return super().lazy_init(*args, rngs=rngs, **self._with_mode(kwargs))

    def _lays_out(self, x: Any) -> bool:
        return global_mesh_defined() or getattr(x, "mesh", None) is not None

    def _with_mode(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        is_said = self.deterministic is not None
        return {"training": not self.deterministic, **kwargs} if is_said else kwargs

    def __call__(
        self,
        *args: Any,
        rngs: Any = None,
        method: Any = None,
        mutable: Filter | None = None,
        **kwargs: Any,
    ) -> Any:
        """Calls the layer.

        Args:
            *args: of the layer.
            rngs: streams in place of the module's own.
            method: the method to call, by default the layer itself.
            mutable: the collections that may change, by default those of the module.
            **kwargs: of the layer; `training` overrides `deterministic`.
        """
        mutable = self.to_nnx__mutable if mutable is None else mutable
        how = {"rngs": rngs, "method": method, "mutable": mutable}
        return super().__call__(*args, **how, **self._with_mode(kwargs))


def as_nnx(x: Any, /, *args: Any, rngs: Any = None, **kwargs: Any) -> nnx.Module:
    """Returns a layer of any library as a module of NNX.

    Its variables are attributes of the module, with their axis metadata, made by
    `module.lazy_init(*inputs)`, or for a whole model by `bridge.lazy_init(model, *inputs)`. A call
    changes them in place, except parameters and sown values.

    Args:
        x: the layer, see `weft.interop.model_of`, or a class of layers. Modules of NNX are returned
            unchanged.
        *args: for a class.
        rngs: `Rngs` or a key, from which the layer's keys are drawn.
        **kwargs: for a class.

    Raises:
        UnknownLayerError: if the library of `x` is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import linen as nn, nnx
        >>> layer = as_nnx(nn.Dense(2), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 3)))
        >>> layer.kernel.shape, layer(jnp.ones((4, 3))).shape
        ((3, 2), (4, 2))
    """
    if isinstance(x, nnx.Module) and not (args or kwargs):
        return x
    if isinstance(x, type) and issubclass(x, nnx.Module):
        return x(*args, **kwargs, **({} if rngs is None else {"rngs": rngs}))
    return InNNX(model_of(x, *args, **kwargs), rngs, mutable=DenyList(("params", "intermediates")))
