"""Layers of NNX in other models (`NNXModel`), and layers of other libraries in models of NNX.

The variables of such a layer are attributes of a `ToNNX`, for a Linen module, or an `InNNX`.
"""

import contextlib
import functools
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

import jax

from weft import errors, nnx
from weft.core import display, meta, partial_eval
from weft.core.filters import DenyList, Filter, in_filter
from weft.core.flat_dict import flatten_dict, unflatten_dict
from weft.core.rngs import LazyRng
from weft.core.tracing import ThreadStack
from weft.interop import linen, models
from weft.interop.models import (
    Keys,
    Layer,
    Method,
    Model,
    Path,
    RngsLike,
    Variables,
)
from weft.interop.variables import collection_of, to_linen_var, to_nnx_var
from weft.linen.state import without_parent
from weft.nnx.intercept import visit_model
from weft.typing import Leaf, PyTree

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

    def __init__(self, module: Layer, rngs: RngsLike = None):
        self.to_nnx__module = module
        if isinstance(rngs, nnx.Rngs):
            rngs = rngs.fork()
        elif isinstance(rngs, Mapping):
            rngs = nnx.Rngs(rngs)
        elif rngs is not None:
            rngs = nnx.Rngs(params=rngs)
        self.to_nnx__rngs = rngs

    @property
    def module(self) -> Layer:
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

    def lazy_init(
        self, *args: PyTree, rngs: RngsLike = None, **kwargs: PyTree
    ) -> Self:
        """Makes the variables and returns the module itself; arguments are those of a call."""
        keys = self._keys(rngs)
        self._init_with_output(keys, args, self._with_mode(kwargs))
        return self

    def _init_with_output(
        self, keys: Keys, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PyTree:
        out, variables = self._model.init_with_output(keys, *args, **kwargs)
        self._assign_variables(variables)
        return out

    def __getattr__(self, name: str) -> Any:
        module = vars(self).get("to_nnx__module")
        is_method = name[:2] != "__" and callable(
            getattr(type(module), name, None)
        )
        if is_method and not isinstance(module, Model):
            return functools.partial(self.__call__, method=name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
        )

    def __call__(
        self,
        *args: PyTree,
        rngs: RngsLike = None,
        method: Method = None,
        mutable: Filter | None = None,
        **kwargs: PyTree,
    ) -> PyTree:
        """Calls the Linen module on its variables.

        Args:
            rngs: streams in place of the module's own: `Rngs`, a key, or keys by stream.
            method: a method, its name, or a function of the Linen module.
            mutable: the collections that the call may change, in place.
        """
        keys = self._keys(rngs)
        model = self._model
        kwargs = {"method": method, **self._with_mode(kwargs)}
        initialized = _INITIALIZED.top
        if initialized is not None:
            if not any(layer is self for layer in initialized):
                initialized.append(self)
                return self._init_with_output(keys, args, kwargs)
            out, _ = model.apply(
                self._variables(), *args, rngs=keys, mutable=True, **kwargs
            )
            return out
        if mutable is None:
            mutable = self.to_nnx__mutable
        variables = self._variables()
        out, changed = model.apply(
            variables, *args, rngs=keys, mutable=mutable or False, **kwargs
        )
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
        keys: dict[str, jax.Array] = {}
        if rngs is None:
            return keys
        for name, stream in rngs.items():
            # Streams that this module's model was not given are none of the Linen module either.
            with contextlib.suppress(errors.InvalidRngError):
                keys[name] = stream()
        return keys

    # The attributes.

    def _own_variables(self) -> dict[Path, Any]:
        attributes: dict[str, Any] = {}
        for name, value in vars(self).items():
            is_mode = name == "deterministic"
            if not (is_mode or name.startswith(("_", _OWN_PREFIX))):
                attributes[name] = value
        return flatten_dict(attributes)

    def _variables(self) -> dict[str, Any]:
        entries: dict[Path, Any] = {}
        for path, variable in self._own_variables().items():
            if not isinstance(variable, nnx.Variable):
                raise errors.LayerVariablesError(
                    f"{type(self).__name__} of {self._model.name} has the attribute "
                    f"{models.path_text(path)!r} of type {type(variable).__name__}, which is in no "
                    "collection; make it a variable, such as nnx.Param."
                )
            entries[collection_of(type(variable)), *path] = to_linen_var(
                variable
            )
        return unflatten_dict(entries)

    def _applies_layout(self, x: Leaf) -> bool:
        """Returns whether to apply the layout of a new value's box; an error without a mesh."""
        return True

    def _assign_variables(self, variables: Mapping[str, Any]) -> None:
        own_variables = self._own_variables()
        new_variables: dict[Path, nnx.Variable[Any]] = {}
        for (collection, *names), entry in flatten_dict(variables).items():
            path = tuple(names)
            variable_type = nnx.variable_type_from_name(
                collection, allow_register=True
            )
            own_variable: nnx.Variable[Any] | None = own_variables.get(path)
            other = new_variables.get(path)
            if other is None and type(own_variable) not in (
                type(None),
                variable_type,
            ):
                other = own_variable
            if other is not None:
                raise errors.LayerVariablesError(
                    f"{self._model.name} has a variable {models.path_text(path)!r} in the "
                    f"collections {collection_of(type(other))!r} and {collection!r}, and a module "
                    "of NNX has one attribute of a name; rename one of them."
                )
            if own_variable is None:
                lay_out = self._applies_layout(entry)
                new_variables[path] = to_nnx_var(
                    collection, entry, lay_out=lay_out
                )
            else:
                new_variable = to_nnx_var(collection, entry, lay_out=False)
                own_variable.set_raw_value(new_variable.get_raw_value())
        for path, variable in new_variables.items():
            self._set_variable(path, variable)

    def _set_variable(self, path: Path, variable: Leaf) -> None:
        if len(path) == 1:
            setattr(self, path[0], variable)
            return
        attribute, *submodules, name = path
        if attribute not in vars(self):
            setattr(self, attribute, {})
        entries = vars(self)[attribute]
        for submodule in submodules:
            if submodule not in entries:
                # Stored as another object, a `Dict` of NNX.
                entries[submodule] = {}
            entries = entries[submodule]
        entries[name] = variable


def lazy_init(
    fn: ModuleOrMethod, *args: PyTree, **kwargs: PyTree
) -> ModuleOrMethod:
    """Makes the variables of other libraries' layers in a module by calling it; returns `fn`.

    Raises TransformArgumentError if `fn` is neither an NNX module nor a method of one.

    >>> model = nnx.Sequential(ToNNX(nn.Dense(4), nnx.Rngs(0)), ToNNX(nn.Dense(2), nnx.Rngs(1)))
    >>> lazy_init(model, jnp.ones((1, 3))).layers[1].kernel.shape
    (4, 2)
    """
    module: Layer = fn
    if not isinstance(fn, nnx.Module):
        method = getattr(fn, "func", fn)  # of a partial, as `ToNNX` has them
        module = getattr(method, "__self__", None)
    if not isinstance(module, nnx.Module) or not callable(fn):
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
    """A module without its values.

    Attributes:
        leaves: its variables and arrays by path, with shapes as values.
        keys: the values in its PRNG streams by path, a shape where no key is known.
    """

    graphdef: Any
    leaves: dict[Path, Any]
    keys: dict[Path, Any]


class MergedModule(NamedTuple):
    """A module with values that were given, by collection and path.

    Attributes:
        values: all its values.
        new_variables: the variables and arrays that were not given, with new initial values.
    """

    module: Layer
    values: dict[Path, Any]
    new_variables: dict[Path, Any]


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

    def __init__(self, module: Layer, *args: PyTree, **kwargs: PyTree):
        self.module, self.args, self.kwargs = module, args, kwargs
        self.takes_rngs = (
            "rngs" not in kwargs and "rngs" in models.parameter_names(module)
        )
        self.abstract = True
        self.metadata_fn: Any = to_linen_var

    @property
    def name(self) -> str:
        return getattr(self.module, "__name__", type(self.module).__name__)

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

    def make(self, rngs: Keys) -> Layer:
        """Returns the module with its initial values."""
        if self._is_instance:
            module = self.nnx.clone(self.module)
            keys: dict[str, jax.Array] = {}
            for tag in self._tags(module):
                if tag in rngs:
                    keys[tag] = rngs[tag]
                elif "default" in rngs:
                    # The same key for each stream would make them draw the same numbers.
                    keys[tag] = LazyRng.create(
                        rngs["default"], tag
                    ).as_jax_rng()
            self.nnx.reseed(module, policy="match_shape", **keys)
            return module
        kwargs = self.kwargs
        if self.takes_rngs:
            kwargs = {**kwargs, "rngs": self.nnx.Rngs(**rngs)}
        with without_parent():
            return self.module(*self.args, **kwargs)

    def module_type(self, rngs: Keys) -> type:
        """Returns the class of the module."""
        return self._describe(rngs).graphdef.root.type

    def _tags(self, module: Layer) -> set[str]:
        tags: set[str] = set()
        for _, node in self.nnx.iter_graph(module):
            if isinstance(node, self.nnx.RngStream):
                tags.add(node.tag)
        return tags

    def _is_key(self, leaf: Leaf) -> bool:
        return isinstance(leaf, self.nnx.RngState)

    def collections(self, module: Layer) -> dict[Path, Any]:
        """Returns a module's variables and arrays, by collection and path, without PRNG streams."""
        _, leaves = self._leaves(module)
        return self._by_collection(leaves)

    def _leaves(self, module: Layer) -> tuple[Any, dict[Path, Any]]:
        graphdef, state = self.nnx.split(module)
        return graphdef, dict(self.nnx.to_flat_state(state))

    def _by_collection(self, leaves: Mapping[Path, Any]) -> dict[Path, Any]:
        variables: dict[Path, Any] = {}
        for path, leaf in leaves.items():
            if not self._is_key(leaf):
                variables[self._collection(leaf), *path] = leaf
        return variables

    def _collection(self, leaf: Leaf) -> str:
        if not isinstance(leaf, nnx.Variable):
            return "arrays"
        return collection_of(type(leaf))

    def boxed(self, leaf: Leaf) -> Leaf:
        """Returns a collection's entry for a variable or array."""
        if not isinstance(leaf, self.nnx.Variable):
            return leaf
        if self.metadata_fn is None:
            return leaf.get_raw_value()
        return self.metadata_fn(leaf)

    def boxes(self, leaves: Mapping[Path, Any]) -> Variables:
        """Returns variables and arrays, by collection and path, as collections."""
        boxes = {path: self.boxed(leaf) for path, leaf in leaves.items()}
        return unflatten_dict(boxes)

    def _describe(self, rngs: Keys) -> _AbstractModule:
        """Returns the module without computing values other than its streams."""
        graphdef: Any = None
        leaves: dict[Path, Any] = {}

        def build(streams: Keys) -> dict[Path, Any]:
            """Returns the values in streams; the rest of the module leaves the trace as shapes."""
            nonlocal graphdef
            graphdef, leaves_with_values = self._leaves(self.make(streams))
            keys: dict[Path, Any] = {}
            for path, leaf in leaves_with_values.items():
                leaves[path] = self._with_value(
                    leaf, display.to_shapes(_raw_value(leaf))
                )
                if self._is_key(leaf):
                    keys[path] = leaf.get_raw_value()
            return keys

        if self.abstract or self._is_instance:
            # What is computed from keys that are not known stays a shape.
            default = jax.eval_shape(lambda: jax.random.key(0))
            is_given = rngs and self._is_instance
            if is_given and self._tags(self.module) == {"default"}:
                # A stream for all purposes.
                default = models.single_key(rngs, "dropout")
            keys = partial_eval.partial_eval_or_shapes(
                build, {"default": default, **rngs}
            )
        else:
            keys = build({"default": jax.random.key(0), **rngs})
        return _AbstractModule(graphdef, leaves, keys)

    def _with_value(self, leaf: Leaf, value: Leaf) -> Leaf:
        if not isinstance(leaf, self.nnx.Variable):
            return value
        return type(leaf).from_metadata(value, leaf.get_metadata())

    def merge_values(
        self, variables: Mapping[str, Any], rngs: Keys, mutable: Filter
    ) -> MergedModule:
        """Returns the module with given values.

        Args:
            rngs: keys by stream; drawing from another stream is an error.
            mutable: the collections whose missing values may be made.

        Raises LayerVariablesError if a value is missing, or a parameter has another shape.
        """
        abstract = self._describe(rngs)
        entries = flatten_dict(variables)
        expected = self._by_collection(abstract.leaves)
        missing = [path for path in expected if path not in entries]
        new_variables: dict[Path, Any] = {}
        if missing and all(in_filter(mutable, path[0]) for path in missing):
            initial = self.collections(self.make(rngs))
            new_variables = {path: initial[path] for path in missing}
        values = {path: meta.unbox(entry) for path, entry in entries.items()}
        for path, leaf in new_variables.items():
            values[path] = _raw_value(leaf)
        self._check_values(expected, values)

        leaves: list[tuple[Path, Any]] = []
        for path, leaf in abstract.leaves.items():
            if self._is_key(leaf):
                leaf = self._rng_leaf(leaf, abstract.keys[path], rngs)
            else:
                leaf = self._with_value(
                    leaf, values[self._collection(leaf), *path]
                )
            leaves.append((path, leaf))
        module = self.nnx.merge(
            abstract.graphdef, self.nnx.from_flat_state(leaves)
        )
        extra = {
            path: entry
            for path, entry in entries.items()
            if path not in expected
        }
        self._attach(module, extra)
        module_values = {
            path: values[path]
            for path in self.collections(module)
            if path in values
        }
        return MergedModule(module, module_values, new_variables)

    def _check_values(
        self, expected: Mapping[Path, Any], values: Mapping[Path, Any]
    ) -> None:
        models.check_variables(self.name, expected, values, shapes=False)
        # Other collections, such as a cache, may hold values for other inputs than the first.
        parameter_shapes: dict[Path, Any] = {}
        for path, leaf in expected.items():
            shape = _raw_value(leaf)
            if path[0] == "params" and hasattr(shape, "shape"):
                parameter_shapes[path] = shape
        models.check_variables(self.name, parameter_shapes, values)

    def _rng_leaf(
        self, leaf: Leaf, value: jax.Array | jax.ShapeDtypeStruct, rngs: Keys
    ) -> Leaf:
        """Returns a part of a PRNG stream; streams without a known key refuse to draw."""
        if not isinstance(value, jax.ShapeDtypeStruct):
            return self._with_value(leaf, value)
        name = self.name
        streams = ", ".join(map(repr, rngs)) or "none"

        def refuse(*_: object) -> NoReturn:
            raise errors.InvalidRngError(
                f"{name} draws a key from a PRNG stream that it was not given; it was given: "
                f"{streams}. Give one for each stream that it draws from, such as "
                "rngs={'dropout': key}, or let the layer not draw."
            )

        with jax.ensure_compile_time_eval():
            key = jax.random.split(jax.random.key(0), value.shape)
        metadata = {**leaf.get_metadata(), "on_get_value": refuse}
        return type(leaf).from_metadata(key, metadata)

    def _attach(self, module: Layer, extra: Mapping[Path, Any]) -> None:
        """Adds values to a module that an earlier call sowed or made."""
        nodes = dict(self.nnx.iter_graph(module))
        strays: list[str] = []
        for (collection, *names), value in extra.items():
            # The innermost module on the path, and what of the path is inside of it.
            holder, inner_path = None, ()
            for depth in range(len(names)):
                node = nodes.get(tuple(names[:depth]))
                if isinstance(node, (self.nnx.Pytree, ToNNX)):
                    holder, inner_path = node, tuple(names[depth:])
            if len(inner_path) == 1:
                setattr(holder, inner_path[0], self._new(collection, value))
            elif isinstance(holder, ToNNX):
                holder._set_variable(inner_path, self._new(collection, value))
            else:
                strays.append(models.path_text((collection, *names)))
        if strays:
            warnings.warn(
                f"{self.name} was given variables that it has no place for: {', '.join(strays)}.",
                stacklevel=6,
            )

    def _new(self, col: str, value: Leaf) -> Leaf:
        if col == "arrays":
            return meta.unbox(value)
        return to_nnx_var(col, value)

    # Using it.

    def init(self, rngs, *args, training=None, method=None, **kwargs):
        module = self.make(rngs)
        self.init_wrapped_layers(module, args, kwargs, method, training)
        return self.boxes(self.collections(module))

    def init_wrapped_layers(
        self,
        module: Layer,
        args: tuple[PyTree, ...],
        kwargs: Mapping[str, PyTree],
        method: Method,
        training: bool | None = None,
    ) -> None:
        """Makes the variables of other libraries' layers in a new module, by calling it.

        All other changes of the call are reverted.
        """
        has_variables = True
        old_values: list[tuple[nnx.Variable[Any], Any]] = []
        for _, node in nnx.iter_graph(module):
            if isinstance(node, ToNNX) and not node._own_variables():
                has_variables = False
            elif isinstance(node, nnx.Variable):
                old_values.append((node, node.get_raw_value()))
        if has_variables:
            return
        with _INITIALIZED.push([]):
            self.call(module, args, kwargs, method, training)
        for variable, value in old_values:
            variable.set_raw_value(value)
        old_ids = {id(variable) for variable, _ in old_values}

        def is_sown(path: Path, node: Leaf) -> bool:
            is_old = id(node) in old_ids
            return isinstance(node, nnx.Intermediate) and not is_old

        nnx.pop(module, is_sown)

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
        merged = self.merge_values(variables, rngs, mutable)
        out = self.call(merged.module, args, kwargs, method, training)
        # What was made is not among the variables of the caller: it is a change.
        old_values: dict[Path, Any] = {}
        for path, value in merged.values.items():
            if path not in merged.new_variables:
                old_values[path] = value
        return out, self.changes(merged.module, old_values, mutable)

    def call(
        self,
        module: Layer,
        args: tuple[PyTree, ...],
        kwargs: Mapping[str, PyTree],
        method: Method,
        training: bool | None = None,
    ) -> PyTree:
        """Calls the module or one of its methods, in a mode."""
        if training is not None and isinstance(module, self.nnx.Module):
            if training:
                module.train()
            else:
                module.eval()
        if isinstance(module, nnx.Pytree):
            visit_model(module)
        with without_parent():
            bound_method = models.resolve_method(module, method, self.name)
            return bound_method(*args, **kwargs)

    def changes(
        self, module: Layer, old_values: Mapping[Path, Any], mutable: Filter
    ) -> Variables:
        """Returns a module's values in mutable collections that are not the old ones."""
        changed: dict[Path, Any] = {}
        for path, leaf in self.collections(module).items():
            is_old = path in old_values and old_values[path] is _raw_value(leaf)
            if not is_old and in_filter(mutable, path[0]):
                changed[path] = leaf
        return self.boxes(changed)


def _raw_value(leaf: Leaf) -> Leaf:
    return leaf.get_raw_value() if hasattr(leaf, "get_raw_value") else leaf


class InNNX(ToNNX):
    """A layer of any library as a module of NNX.

    `train()` and `eval()` of the surrounding model set its mode; `training` in a call overrides it.

    Args:
        mutable: the collections that a call may change.

    Attributes:
        deterministic: the opposite of training mode; None does not set the mode.
    """

    def __init__(
        self, model: Model, rngs: RngsLike = None, *, mutable: Filter = True
    ):
        super().__init__(model, rngs)
        self.to_nnx__mutable = mutable
        self.deterministic: bool | None = None

    def _applies_layout(self, x: Leaf) -> bool:
        has_mesh = getattr(x, "mesh", None) is not None
        return has_mesh or meta.global_mesh_defined()

    def _with_mode(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if self.deterministic is None:
            return kwargs
        return {"training": not self.deterministic, **kwargs}


def as_nnx(
    x: Layer, /, *args: PyTree, rngs: RngsLike = None, **kwargs: PyTree
) -> nnx.Module:
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
        if rngs is not None:
            kwargs = {**kwargs, "rngs": rngs}
        return x(*args, **kwargs)
    model = models.model_of(x, *args, **kwargs)
    return InNNX(model, rngs, mutable=DenyList(("params", "intermediates")))
