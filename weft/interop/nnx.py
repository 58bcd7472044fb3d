"""Layers of NNX in other models (`NNXModel`), and layers of other libraries in models of NNX.

The variables of such a layer are attributes of a `ToNNX`, for a Linen module, or an `InNNX`.
"""

import contextlib
import functools
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, TypeVar

import jax

from weft import errors, nnx
from weft.core import display, meta, partial_eval
from weft.core.filters import DenyList, Filter, in_filter
from weft.core.flat_dict import flatten_dict, unflatten_dict
from weft.core.tracing import ThreadStack
from weft.interop import linen, models
from weft.interop.models import Keys, Method, Model, Path, RngsLike, Variables
from weft.interop.variables import collection_of, to_linen_var, to_nnx_var
from weft.linen.state import without_parent
from weft.nnx.intercept import visit_model

ModuleOrMethod = TypeVar("ModuleOrMethod")
_OWN_PREFIX = "to_nnx__"


class ToNNX(nnx.Module):
    """A Linen module as a module of NNX.

    Its variables are attributes, made by `lazy_init`; those of a submodule are in a dict with the
    submodule's name. Its methods are those of the Linen module, called as by `method`.

    Args:
        rngs: a key, or `Rngs` to fork. Each call draws of each stream; `default` also as `params`.

    >>> layer = ToNNX(nn.Dense(2), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 3)))
    >>> layer.kernel.shape
    (3, 2)
    """

    to_nnx__mutable: Filter = False

    def __init__(self, module: object, rngs: RngsLike = None):
        self.to_nnx__module = module
        if isinstance(rngs, nnx.Rngs):
            rngs = rngs.fork()
        elif rngs is not None:
            rngs = nnx.Rngs(params=rngs)
        self.to_nnx__rngs = rngs

    @property
    def module(self) -> Any:
        """Linen module."""
        return self.to_nnx__module

    @property
    def rngs(self) -> nnx.Rngs | None:
        """PRNG streams."""
        return self.to_nnx__rngs

    @property
    def _model(self) -> Model:
        module = self.to_nnx__module
        return module if isinstance(module, Model) else linen.LinenModel(module)

    def lazy_init(self, *args: Any, rngs: RngsLike = None, **kwargs: Any) -> Self:
        """Makes the variables and returns the module itself; arguments are those of a call."""
        self._init_with_output(self._keys(rngs), args, self._with_mode(kwargs))
        return self

    def _init_with_output(self, keys: Keys, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out, variables = self._model.init_with_output(keys, *args, **kwargs)
        self._assign_variables(variables)
        return out

    def __getattr__(self, name: str) -> Any:
        module = vars(self).get("to_nnx__module")
        is_method = name[:2] != "__" and callable(getattr(type(module), name, None))
        if is_method and not isinstance(module, Model):
            return functools.partial(self.__call__, method=name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __call__(
        self,
        *args: Any,
        rngs: RngsLike = None,
        method: Method = None,
        mutable: Filter | None = None,
        **kwargs: Any,
    ) -> Any:
        """Calls the Linen module on its variables.

        Args:
            rngs: streams in place of the module's own: `Rngs`, a key, or keys by stream.
            method: a method, its name, or a function of the Linen module.
            mutable: the collections that the call may change, in place.
        """
        keys, model = self._keys(rngs), self._model
        call: dict[str, Any] = {"method": method, **self._with_mode(kwargs)}
        if (initialized := _INITIALIZED.top) is not None:
            if not any(m is self for m in initialized):
                initialized.append(self)
                return self._init_with_output(keys, args, call)
            return model.apply(self._variables(), *args, rngs=keys, mutable=True, **call)[0]
        mutable = (self.to_nnx__mutable if mutable is None else mutable) or False
        out, changed = model.apply(self._variables(), *args, rngs=keys, mutable=mutable, **call)
        if changed:
            self._assign_variables(changed)
        return out

    def _with_mode(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call, with the training mode if it is set."""
        return kwargs

    def _keys(self, rngs: RngsLike) -> dict[str, Any]:
        if isinstance(rngs, Mapping):
            return dict(rngs)
        if rngs is None:
            rngs = self.to_nnx__rngs
        elif not isinstance(rngs, nnx.Rngs):
            return {"params": rngs}
        keys = {}
        for name, stream in [] if rngs is None else rngs.items():
            # Streams that this module's model was not given are none of the Linen module either.
            with contextlib.suppress(errors.InvalidRngError):
                keys[name] = stream()
        return keys

    # The attributes.

    def _own_variables(self) -> dict[Path, Any]:
        own = {n: x for n, x in vars(self).items() if not n.startswith(("_", _OWN_PREFIX))}
        own.pop("deterministic", None)  # the mode
        return flatten_dict(own)

    def _variables(self) -> dict[str, Any]:
        found: dict[Path, Any] = {}
        for path, x in self._own_variables().items():
            if not isinstance(x, nnx.Variable):
                raise errors.LayerVariablesError(
                    f"{type(self).__name__} of {self._model.name} has the attribute "
                    f"{models.path_text(path)!r} of type {type(x).__name__}, which is in no "
                    "collection; make it a variable, such as nnx.Param."
                )
            found[collection_of(type(x)), *path] = to_linen_var(x)
        return unflatten_dict(found)

    def _applies_layout(self, x: object) -> bool:
        """Returns whether to apply the layout of a new value's box; an error without a mesh."""
        return True

    def _assign_variables(self, variables: Mapping[str, Any]) -> None:
        there: dict[Path, Any] = self._own_variables()
        new: dict[Path, Any] = {}
        for (col, *rest), x in flatten_dict(variables).items():
            path, kind = tuple(rest), nnx.variable_type_from_name(col, allow_register=True)
            before: Any = new.get(path, there.get(path))
            if path in new or (before is not None and type(before) is not kind):
                raise errors.LayerVariablesError(
                    f"{self._model.name} has a variable {models.path_text(path)!r} in the "
                    f"collections {collection_of(type(before))!r} and {col!r}, and a module of "
                    "NNX has one attribute of a name; rename one of them."
                )
            if before is None:
                new[path] = to_nnx_var(col, x, lay_out=self._applies_layout(x))
            else:
                before.set_raw_value(to_nnx_var(col, x, lay_out=False).get_raw_value())
        for path, variable in new.items():
            self._set_variable(path, variable)

    def _set_variable(self, path: Path, variable: object) -> None:
        name, *below = path
        if not below:
            setattr(self, name, variable)
            return
        if name not in vars(self):
            setattr(self, name, {})
        entries = vars(self)[name]
        for part in below[:-1]:
            if part not in entries:
                entries[part] = {}  # stored as another object, a `Dict` of NNX
            entries = entries[part]
        entries[below[-1]] = variable


def lazy_init(fn: ModuleOrMethod, *args: Any, **kwargs: Any) -> ModuleOrMethod:
    """Makes the variables of other libraries' layers in a module by calling it; returns `fn`.

    Raises TransformArgumentError if `fn` is neither an NNX module nor a method of one.

    >>> model = nnx.Sequential(ToNNX(nn.Dense(4), nnx.Rngs(0)), ToNNX(nn.Dense(2), nnx.Rngs(1)))
    >>> lazy_init(model, jnp.ones((1, 3))).layers[1].kernel.shape
    (4, 2)
    """
    of = fn if isinstance(fn, nnx.Module) else getattr(getattr(fn, "func", fn), "__self__", None)
    if not isinstance(of, nnx.Module) or not callable(fn):
        raise errors.TransformArgumentError(
            f"lazy_init was given {fn!r}; give a module of NNX that can be called, or a method of "
            "one, such as model.encode."
        )
    if isinstance(fn, ToNNX):
        fn.lazy_init(*args, **kwargs)
        return fn  # pyright: ignore[reportReturnType]
    with _INITIALIZED.push([]):
        fn(*args, **kwargs)
    return fn


# The modules that the running `lazy_init` has initialized: each makes its variables once.
_INITIALIZED = ThreadStack[list[ToNNX]]()


class _AbstractModule(NamedTuple):
    """A module without its values: its variables and arrays with shapes, by path.

    `keys` are the values in PRNG streams, by path.
    """

    graphdef: Any
    leaves: dict[Path, Any]
    keys: dict[Path, Any]


class NNXModel(Model):
    """An NNX module.

    Args:
        module: the module, whose values are the initial ones; or a class or function that makes it.
        **kwargs: for a class, except `rngs`.

    Attributes:
        takes_rngs: whether the class receives the streams as `rngs`.
        abstract: whether to skip computing initial values where values are given.
        metadata_fn: converts a variable to its entry in a collection.
    """

    nnx: Any = nnx
    quantizes = True

    def __init__(self, module: Any, *args: object, **kwargs: Any):
        self.module, self.args, self.kwargs = module, args, kwargs
        self.takes_rngs = "rngs" not in kwargs and "rngs" in models.parameter_names(module)
        self.abstract = True
        self.metadata_fn: Any = to_linen_var

    @property
    def name(self) -> str:
        of_class = self.module if isinstance(self.module, type) else type(self.module)
        return getattr(self.module, "__name__", of_class.__name__)

    @property
    def _is_instance(self) -> bool:
        return isinstance(self.module, self.nnx.Pytree)

    def trains(self, collection):
        try:
            kind = self.nnx.variable_type_from_name(collection)
        except ValueError:
            return False
        return issubclass(kind, self.nnx.Param)

    # Making it.

    def make(self, rngs: Keys) -> Any:
        """Returns the module with its initial values."""
        if self._is_instance:
            made = self.nnx.clone(self.module)
            keys = {tag: rngs[tag] for tag in self._tags(made) if tag in rngs}
            if "default" in rngs:
                keys = {**dict.fromkeys(self._tags(made), rngs["default"]), **keys}
            self.nnx.reseed(made, policy="match_shape", **keys)
            return made
        streams = {"rngs": self.nnx.Rngs(**rngs)} if self.takes_rngs else {}
        with without_parent():
            return self.module(*self.args, **self.kwargs, **streams)

    def module_type(self, rngs: Keys) -> type:
        """Returns the class of the module."""
        return self._describe(rngs).graphdef.root.type

    def _tags(self, module: object) -> set[str]:
        found = (x for _, x in self.nnx.iter_graph(module))
        return {x.tag for x in found if isinstance(x, self.nnx.RngStream)}

    def _is_key(self, leaf: object) -> bool:
        return isinstance(leaf, self.nnx.RngState)

    def collections(self, module: object) -> dict[Path, Any]:
        """Returns a module's variables and arrays, by collection and path, without PRNG streams."""
        return self._by_collection(self._leaves(module)[1])

    def _leaves(self, module: object) -> tuple[Any, dict[Path, Any]]:
        graphdef, state = self.nnx.split(module)
        return graphdef, dict(self.nnx.to_flat_state(state))

    def _by_collection(self, leaves: Mapping[Path, Any]) -> dict[Path, Any]:
        return {
            (self._collection(leaf), *path): leaf
            for path, leaf in leaves.items()
            if not self._is_key(leaf)
        }

    def _collection(self, leaf: object) -> str:
        return collection_of(type(leaf)) if isinstance(leaf, nnx.Variable) else "arrays"

    def boxed(self, leaf: Any) -> Any:
        """Returns a collection's entry for a variable or array."""
        if not isinstance(leaf, self.nnx.Variable):
            return leaf
        return leaf.get_raw_value() if self.metadata_fn is None else self.metadata_fn(leaf)

    def boxes(self, leaves: Mapping[Path, Any]) -> Variables:
        """Returns variables and arrays, by collection and path, as collections."""
        return unflatten_dict({path: self.boxed(leaf) for path, leaf in leaves.items()})

    def _describe(self, rngs: Keys) -> _AbstractModule:
        """Returns the module without computing values other than its streams."""
        found: list[Any] = []

        def build(rngs: Keys) -> list[Any]:
            graphdef, leaves = self._leaves(self.make(rngs))
            shapes = {
                path: self._with_value(leaf, display.to_shapes(_raw_value(leaf)))
                for path, leaf in leaves.items()
            }
            found[:] = [graphdef, shapes]
            return [x.get_raw_value() for x in leaves.values() if self._is_key(x)]

        absent = jax.eval_shape(lambda: jax.random.key(0))
        if self._is_instance and self._tags(self.module) == {"default"}:
            # A stream for all purposes.
            absent = models.single_key(rngs, "dropout") if rngs else absent
        streams = {"default": absent, **rngs}
        if not (self.abstract or self._is_instance):
            streams = {"default": jax.random.key(0), **rngs}
            values = build(streams)
        else:
            values = partial_eval.partial_eval_or_shapes(build, streams)
        paths = [path for path, leaf in found[1].items() if self._is_key(leaf)]
        return _AbstractModule(found[0], found[1], dict(zip(paths, values, strict=True)))

    def _with_value(self, leaf: Any, value: Any) -> Any:
        if not isinstance(leaf, self.nnx.Variable):
            return value
        return type(leaf).from_metadata(value, leaf.get_metadata())

    def merge_values(
        self, variables: Mapping[str, Any], rngs: Keys, mutable: Filter
    ) -> tuple[Any, dict[Path, Any], dict[Path, Any]]:
        """Returns the module with given values, all its values, and those that were newly made.

        Args:
            rngs: keys by stream; drawing from another stream is an error.
            mutable: the collections whose missing values may be made.

        Raises LayerVariablesError if a value is missing, or a parameter has another shape.
        """
        parts, given = self._describe(rngs), flatten_dict(variables)
        wanted = self._by_collection(parts.leaves)
        missing = {path: leaf for path, leaf in wanted.items() if path not in given}
        made: dict[Path, Any] = {}
        if missing and all(in_filter(mutable, path[0]) for path in missing):
            first = self.collections(self.make(rngs))
            made = {path: first[path] for path in missing}
        values = {path: meta.unbox(x) for path, x in given.items()}
        values.update((path, _raw_value(x)) for path, x in made.items())
        models.check_variables(self.name, wanted, values, shapes=False)
        parameters = {p: _raw_value(x) for p, x in wanted.items() if p[0] == "params"}
        with_shapes = {p: x for p, x in parameters.items() if hasattr(x, "shape")}
        models.check_variables(self.name, with_shapes, values)
        leaves = {
            path: self._rng_leaf(leaf, parts.keys[path], rngs)
            if self._is_key(leaf)
            else self._with_value(leaf, values[self._collection(leaf), *path])
            for path, leaf in parts.leaves.items()
        }
        module = self.nnx.merge(parts.graphdef, self.nnx.from_flat_state(list(leaves.items())))
        self._attach(module, {path: given[path] for path in given if path not in wanted})
        kept = {path: values[path] for path in self.collections(module) if path in values}
        return module, kept, made

    def _rng_leaf(self, leaf: Any, value: Any, rngs: Keys) -> Any:
        """Returns a part of a PRNG stream; streams without a known key refuse to draw."""
        if not isinstance(value, jax.ShapeDtypeStruct):
            return self._with_value(leaf, value)
        there, name = ", ".join(map(repr, rngs)) or "none", self.name

        def refuse(*_: object) -> Any:
            raise errors.InvalidRngError(
                f"{name} draws a key from a PRNG stream that it was not given; it was given: "
                f"{there}. Give one for each stream that it draws from, such as "
                "rngs={'dropout': key}, or let the layer not draw."
            )

        with jax.ensure_compile_time_eval():
            key = jax.random.split(jax.random.key(0), value.shape)
        metadata = {**leaf.get_metadata(), "on_get_value": refuse}
        return type(leaf).from_metadata(key, metadata)

    def _attach(self, module: object, extra: Mapping[Path, Any]) -> None:
        """Adds values to a module that an earlier call sowed or made."""
        places, kinds = dict(self.nnx.iter_graph(module)), (self.nnx.Pytree, ToNNX)
        strays = []
        for (col, *path), value in extra.items():
            ends = [n for n in range(len(path)) if isinstance(places.get(tuple(path[:n])), kinds)]
            holder = places[tuple(path[: ends[-1]])] if ends else None
            if ends and ends[-1] == len(path) - 1:
                setattr(holder, path[-1], self._new(col, value))
            elif isinstance(holder, ToNNX):
                holder._set_variable(tuple(path[ends[-1] :]), self._new(col, value))
            else:
                strays.append(models.path_text((col, *path)))
        if strays:
            warnings.warn(
                f"{self.name} was given variables that it has no place for: {', '.join(strays)}.",
                stacklevel=6,
            )

    def _new(self, col: str, value: object) -> Any:
        return to_nnx_var(col, value) if col != "arrays" else meta.unbox(value)

    # Using it.

    def init(self, rngs, *args, training=None, method=None, **kwargs):
        module = self.make(rngs)
        self.init_wrapped_layers(module, args, kwargs, method, training)
        return self.boxes(self.collections(module))

    def init_wrapped_layers(
        self, module: Any, args: Any, kwargs: Any, method: Method, training: bool | None = None
    ) -> None:
        """Makes the variables of other libraries' layers in a new module, by calling it.

        All other changes of the call are reverted.
        """
        graph = [x for _, x in nnx.iter_graph(module)]
        if all(x._own_variables() for x in graph if isinstance(x, ToNNX)):
            return
        before = [(x, x.get_raw_value()) for x in graph if isinstance(x, nnx.Variable)]
        with _INITIALIZED.push([]):
            self.call(module, args, kwargs, method, training)
        for variable, value in before:
            variable.set_raw_value(value)
        there = {id(variable) for variable, _ in before}
        nnx.pop(module, lambda _, x: isinstance(x, nnx.Intermediate) and id(x) not in there)

    def apply(self, variables, *args, rngs, mutable, training=None, method=None, **kwargs):
        module, before, made = self.merge_values(variables, rngs, mutable)
        out = self.call(module, args, kwargs, method, training)
        return out, self.changes(
            module, {p: v for p, v in before.items() if p not in made}, mutable
        )

    def call(
        self, module: Any, args: Any, kwargs: Any, method: Method, training: bool | None = None
    ) -> Any:
        """Calls the module or one of its methods, in a mode."""
        if training is not None and isinstance(module, self.nnx.Module):
            module.train() if training else module.eval()
        if isinstance(module, nnx.Pytree):
            visit_model(module)
        with without_parent():
            return models.resolve_method(module, method, self.name)(*args, **kwargs)

    def changes(self, module: object, before: Mapping[Path, Any], mutable: Filter) -> Variables:
        """Returns a module's values in mutable collections that differ from before."""
        changed = {
            path: leaf
            for path, leaf in self.collections(module).items()
            if in_filter(mutable, path[0])
            and (path not in before or before[path] is not _raw_value(leaf))
        }
        return self.boxes(changed)


def _raw_value(leaf: Any) -> Any:
    return leaf.get_raw_value() if hasattr(leaf, "get_raw_value") else leaf


class InNNX(ToNNX):
    """A layer of any library as a module of NNX.

    `train()` and `eval()` of the surrounding model set its mode; `training` in a call overrides it.

    Args:
        mutable: the collections that a call may change.

    Attributes:
        deterministic: the opposite of training mode; None does not set the mode.
    """

    def __init__(self, model: Model, rngs: RngsLike = None, *, mutable: Filter = True):
        super().__init__(model, rngs)
        self.to_nnx__mutable = mutable
        self.deterministic: bool | None = None

    def _applies_layout(self, x: object) -> bool:
        return meta.global_mesh_defined() or getattr(x, "mesh", None) is not None

    def _with_mode(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        has_mode = self.deterministic is not None
        return {"training": not self.deterministic, **kwargs} if has_mode else kwargs


def as_nnx(x: object, /, *args: object, rngs: RngsLike = None, **kwargs: object) -> nnx.Module:
    """Returns a layer of any library as a module of NNX.

    Its variables are attributes of the module, with their axis metadata, made by
    `module.lazy_init(*inputs)`, or for a whole model by `bridge.lazy_init(model, *inputs)`. A call
    changes them in place, except parameters and sown values.

    Args:
        x: a layer, see `weft.interop.model_of`, or class of layers; NNX modules stay as they are.
        rngs: `Rngs` or a key, from which the layer's keys are drawn.

    Raises UnknownLayerError if the library of `x` is unknown.

    >>> layer = as_nnx(nn.Dense(2), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 3)))
    >>> layer.kernel.shape, layer(jnp.ones((4, 3))).shape
    ((3, 2), (4, 2))
    """
    if isinstance(x, nnx.Module) and not (args or kwargs):
        return x
    if isinstance(x, type) and issubclass(x, nnx.Module):
        return x(*args, **kwargs, **({} if rngs is None else {"rngs": rngs}))
    model = models.model_of(x, *args, **kwargs)
    return InNNX(model, rngs, mutable=DenyList(("params", "intermediates")))
