"""Layers of the hierarchy in other models, and layers of other libraries in the hierarchy."""

import contextlib
import inspect
from collections.abc import Collection, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from weft import config as config_lib
from weft import errors
from weft.config import functions
from weft.config.configurable import needs_allow
from weft.core import display, filters, logical, meta, spmd
from weft.core.axis_rules import composite_rules, get_logical_axis_rules
from weft.core.flat_dict import flatten_dict, unflatten_dict
from weft.core.partial_eval import partial_eval
from weft.functional import cast_floats, default_dot_general
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.context import OutputCollection
from weft.hierarchy.module import Module, functional, get_public_method, nowrap
from weft.hierarchy.parameter_spec import pad_axes
from weft.interop import models
from weft.interop.models import Model, Path
from weft.interop.variables import NNXMeta
from weft.nnx.eager_sharding import use_eager_sharding
from weft.typing import DType, Leaf, PyTree, T


class HierarchyModel(Model):
    """A layer of the hierarchy.

    Its parameters are the collection `params`, except those that a call in training updates, which
    are the collection `state`. Its reports are in `summaries` and `module_outputs`.

    Args:
        config: of the layer, or a class of layers.
    """

    quantizes = True

    def __init__(self, config: models.Layer, **kwargs: PyTree):
        _check_is_layer(config, kwargs)
        if isinstance(config, type):
            config = config.default_config()  # pyright: ignore[reportAttributeAccessIssue]
        self.config = config.clone(**kwargs)
        named_config = self.config
        if named_config.name is config_lib.REQUIRED:
            named_config = named_config.clone(name="layer")
        self._layer: Module = named_config.instantiate(parent=None)

    @property
    def name(self) -> str:
        return type(self._layer).__name__

    def _specs(self) -> dict[str, Any]:
        if not isinstance(self._layer, BaseLayer):
            return {}
        return self._layer.create_parameter_specs_recursively()

    def _call(
        self,
        state: PyTree,
        key: jax.Array,
        training: bool | None,
        method: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[PyTree, OutputCollection]:
        if method is None or method == "__call__":
            method = "forward"
        fn = get_public_method(self._layer, method)
        if fn is None:
            raise errors.LayerMethodError(
                f"{self.name} has no method {method!r}; expected one such as 'forward'."
            )
        inputs: Any = args
        if kwargs:
            inputs = inspect.signature(fn).bind(*args, **kwargs).arguments
        return functional(
            self._layer,
            prng_key=key,
            state=state,
            inputs=inputs,
            method=method,
            is_training=bool(training),
            drop_output_collections=(),
        )

    def init(self, rngs, *args, training=None, method=None, **kwargs):
        key = models.single_key(rngs, "params", "default")
        if not isinstance(self._layer, BaseLayer):
            return {}
        state = self._layer.initialize_parameters_recursively(key)
        arrays, fill = display.split_arrays((state, args, kwargs))

        def state_updates(arrays: list[jax.Array], key: jax.Array) -> PyTree:
            state, args, kwargs = fill(arrays)
            _, outputs = self._call(state, key, True, method, args, kwargs)
            return outputs.state_updates

        updated = flatten_dict(
            jax.eval_shape(state_updates, arrays, jax.random.key(0))
        )
        specs = flatten_dict(self._specs())
        variables: dict[Path, Any] = {}
        for path, value in flatten_dict(state).items():
            collection = "state" if path in updated else "params"
            variables[collection, *path] = _boxed(value, specs[path])
        return unflatten_dict(variables)

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
        collections: dict[Path, str] = {}
        values: dict[Path, Any] = {}
        for collection in ("params", "state"):
            entries = flatten_dict(variables.get(collection, {}))
            for path, entry in entries.items():
                collections[path] = collection
                values[path] = meta.unbox(entry)
        specs = self._specs()
        models.check_variables(self.name, flatten_dict(specs), values)

        def value_of(
            path: jax.tree_util.KeyPath, spec: ParameterSpec
        ) -> PyTree:
            return values[tuple(entry.key for entry in path)]

        # With an entry for each child, also for one without parameters.
        state = jax.tree_util.tree_map_with_path(value_of, specs)
        key = models.single_key(rngs, "default", "dropout")
        out, outputs = self._call(state, key, training, method, args, kwargs)
        changed: dict[Path, Any] = {}
        for path, value in flatten_dict(outputs.state_updates).items():
            changed[collections.get(path, "state"), *path] = value
        for path, value in flatten_dict(outputs.summaries).items():
            changed["summaries", *path] = value
        for path, value in flatten_dict(outputs.module_outputs).items():
            changed["module_outputs", *path] = value
        for path in list(changed):
            if not filters.in_filter(mutable, path[0]):
                del changed[path]
        return out, unflatten_dict(changed)


def _boxed(value: T, spec: ParameterSpec) -> "T | _NamedAxes":
    names = tuple(spec.logical_axes or spec.partition_spec)
    if not any(names):
        return value
    return _NamedAxes(value, names)


class _NamedAxes(meta.Partitioned):
    """A parameter whose axes have names: mesh axes, or names that the context's rules map to some.

    The mesh is by default that of `jax.set_mesh`.
    """

    def unbox(self, apply_constraint: bool = True) -> Any:
        if not apply_constraint:
            return self.value
        return spmd.constrain(
            self.value, logical.names_to_mesh_axes(self.names), self.mesh
        )


def _check_is_layer(config: models.Layer, kwargs: Mapping[str, Any]) -> None:
    """Refuses modules that act outside of a run, and fields reserved for the layer's config."""
    cls = config
    if not isinstance(config, type):
        cls = getattr(config, "klass", type(config))
    guarded_fields = needs_allow(cls)
    if guarded_fields and not issubclass(cls, BaseLayer):
        raise errors.UnknownLayerError(
            f"{cls.__name__} is not a layer: it acts outside of a model, such as by writing files; "
            "expected a subclass of BaseLayer, or a module that only computes."
        )
    reserved_fields = {"klass"}
    if isinstance(guarded_fields, frozenset):
        reserved_fields |= guarded_fields
    refused = sorted(reserved_fields.intersection(kwargs))
    if refused:
        raise errors.UnknownLayerError(
            f"{cls.__name__} was given {', '.join(refused)} by name; set it in the layer's config."
        )


class InHierarchy(BaseLayer):
    """A layer of any library as a layer of the hierarchy; see `as_hierarchy`.

    Its state has the layer's collections by name. In an invocation, changes of them become state
    updates; new values sown into a collection `summaries` become summaries, others module outputs.
    A `dtype` set here or in an outer layer is that of the parameters; the layer itself defines
    their initialization and layout.
    """

    class Config(BaseLayer.Config):
        """Configures an InHierarchy."""

        layer: config_lib.Required[Any] = config_lib.REQUIRED
        """See `weft.interop.model_of`."""
        args: tuple = ()
        """Arguments of a class of layers."""
        kwargs: dict[str, Any] = {}
        """Keyword arguments of a class of layers."""
        inputs: config_lib.Required[tuple] = config_lib.REQUIRED
        """Those of a call: arrays or `jax.ShapeDtypeStruct`."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        try:
            self._model = models.model_of(cfg.layer, *cfg.args, **cfg.kwargs)
        except errors.UnknownLayerError as error:
            raise errors.UnknownLayerError(f"{self.path()}: {error}") from error
        for name in ("param_init", "param_partition_spec"):
            value = getattr(cfg, name)
            if value is not None:
                raise errors.ParameterSpecError(
                    f"{self.path()} has {name}={value!r:.80}, but its parameters are "
                    f"those of {self._model.name}, a layer of another library, which says itself "
                    "how they begin and are laid out. Leave it out, and give that layer its "
                    "initializers, with the names of their axes."
                )
        if (
            self.dot_general() not in (None, jax.lax.dot_general)
            and not self._model.quantizes
        ):
            raise errors.InvalidConfigValueError(
                f"{self.path()} is to quantize matrix products, but it is {self._model.name}, a "
                "layer of another library, which computes them itself. Give its linear layers "
                "dot_general=weft.functional.int8_dot_general or fp8_dot_general where they are "
                "made; or set quantization='off' here."
            )
        self._variable_shapes: dict[Path, Any] | None = None

    def _make(self, key: jax.Array) -> dict[str, Any]:
        def with_values(x: Leaf) -> Leaf:
            if isinstance(x, jax.ShapeDtypeStruct):
                return jnp.zeros(x.shape, x.dtype)
            return x

        inputs = jax.tree.map(with_values, self.config.inputs)
        # As in training: statistics that only a batch can begin have to be made.
        try:
            # The specs determine the layout.
            with use_eager_sharding(False):
                variables = dict(
                    self._model.init({"default": key}, *inputs, training=True)
                )
        except TypeError as error:
            if inputs:
                raise
            raise errors.LayerInputsError(
                f"{self.path()} holds a {self._model.name}, whose parameters follow from what it "
                f"is called with, and was given no inputs ({error}); say "
                "weft.interop.as_hierarchy(layer, inputs=(jax.ShapeDtypeStruct(shape, dtype),))."
            ) from error
        for name in _OUTPUT_COLLECTIONS:
            variables.pop(name, None)
        return self._with_cast_parameters(variables, self._configured_dtype())

    def _with_cast_parameters(
        self, variables: Mapping[str, Any], dtype: DType | None
    ) -> dict[str, Any]:
        cast: dict[str, Any] = {}
        for collection, entries in variables.items():
            is_trained = self._model.trains(collection)
            cast[collection] = (
                cast_floats(entries, dtype) if is_trained else entries
            )
        return cast

    def _configured_dtype(self) -> DType | None:
        layer: Module | None = self
        while isinstance(layer, BaseLayer):
            if layer.config.dtype is not None:
                return layer.config.dtype
            layer = layer.parent
        return None

    def _variables(self) -> dict[Path, Any]:
        if self._variable_shapes is None:
            self._variable_shapes = flatten_dict(
                jax.eval_shape(self._make, jax.random.key(0))
            )
        return self._variable_shapes

    def _shown_parts(self) -> dict[str, Any]:
        parts = {"layer": self.config.layer, **super()._shown_parts()}
        with contextlib.suppress(
            Exception
        ):  # a layer that is wrong has a text too
            parts |= self.create_parameter_specs_recursively()
        return parts

    @nowrap
    def create_parameter_specs_recursively(self) -> dict[str, Any]:
        specs: dict[Path, Any] = {}
        for path, entry in self._variables().items():
            specs[_string_path(path)] = _spec(
                entry, is_state=not self._model.trains(path[0])
            )
        return unflatten_dict(specs)

    @nowrap
    def initialize_parameters_recursively(
        self, prng_key, *, prebuilt: Mapping[str, Any] | None = None
    ):
        made = partial_eval(
            self._make, prng_key
        )  # without what the variables do not need
        state = _unboxed_values(made)
        values = dict(state)
        for path, value in flatten_dict(prebuilt or {}).items():
            if value is None:
                continue
            if path not in state or np.shape(value) != jnp.shape(state[path]):
                shapes = [
                    f"{models.path_text(p)} {jnp.shape(x)}"
                    for p, x in state.items()
                ]
                raise errors.ParameterSpecError(
                    f"prebuilt has {models.path_text(path)!r} of shape {np.shape(value)} for "
                    f"{self.path()}, whose layer {self._model.name} has: "
                    f"{', '.join(shapes) or 'none'}."
                )
            # A spec says that a value will be put in its place.
            values[path] = None if isinstance(value, ParameterSpec) else value
        return unflatten_dict(values)

    @nowrap
    def cast_parameters_recursively(
        self, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        return self._with_cast_parameters(params, self.compute_dtype())

    def forward(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Calls the layer, or its public method named `method`, with the given arguments.

        Raises LayerMethodError if the method is private.
        """
        method = kwargs.get("method")
        if (
            isinstance(method, str)
            and method.startswith("_")
            and method != "__call__"
        ):
            raise errors.LayerMethodError(
                f"{self.path()} is to call {method!r} of a {self._model.name}; name one of its "
                "public methods."
            )
        # The state has strings as keys; the layer's own paths may have numbers.
        layer_paths: dict[Path, Path] = {}
        expected: dict[Path, Any] = {}
        trained_collections: set[str] = set()
        for path, entry in self._variables().items():
            layer_paths[_string_path(path)] = path
            expected[_string_path(path)] = meta.unbox(entry)
            if self._model.trains(path[0]):
                trained_collections.add(path[0])
        values = flatten_dict(cast(dict[str, Any], self.state))
        models.check_variables(self._model.name, expected, values)
        variables: dict[Path, Any] = {}
        for path, value in values.items():
            if path in layer_paths:
                variables[layer_paths[path]] = value
        keys: dict[str, jax.Array] = {}
        if self.prng_key is not None:
            keys["default"] = self.prng_key
        with use_eager_sharding(False), self._quantized():
            out, changed = self._model.apply(
                unflatten_dict(variables),
                *args,
                rngs=keys,
                mutable=filters.DenyList(tuple(trained_collections)),
                training=self.is_training,
                **kwargs,
            )
        self._add_outputs(_unboxed_values(changed), layer_paths)
        return out

    def _quantized(self) -> contextlib.AbstractContextManager[None]:
        dot_general = self.dot_general()
        if dot_general is None:
            return contextlib.nullcontext()
        return default_dot_general(dot_general)

    def _add_outputs(
        self, changed: Mapping[Path, Any], state_paths: Collection[Path]
    ) -> None:
        flat_updates: dict[Path, Any] = {}
        flat_reports: dict[Path, Any] = {}
        for path, value in changed.items():
            if path in state_paths:
                flat_updates[path] = value
            else:
                flat_reports[path] = value
        for collection, entries in unflatten_dict(flat_updates).items():
            self.add_state_update(collection, entries)
        reports = unflatten_dict(flat_reports)
        for name, value in reports.pop("summaries", {}).items():
            self.add_summary(name, _sown_value(value))
        for name, value in {
            **reports.pop("module_outputs", {}),
            **reports,
        }.items():
            self.add_module_output(name, value)


_OUTPUT_COLLECTIONS = ("summaries", "module_outputs", "intermediates")
"""Collections of what a call reports; they are not state."""


def _string_path(path: Path) -> tuple[str, ...]:
    return tuple(map(str, path))


def _unboxed_values(variables: Mapping[str, Any]) -> dict[Path, Any]:
    values: dict[Path, Any] = {}
    for path, entry in flatten_dict(variables).items():
        values[_string_path(path)] = meta.unbox(entry)
    return values


def _sown_value(value: PyTree) -> PyTree:
    """Returns the sown value, or a dict of them by number if there are several."""
    if isinstance(value, Mapping):
        return {name: _sown_value(entry) for name, entry in value.items()}
    if type(value) is not tuple:
        return value
    if len(value) == 1:
        return value[0]
    return {str(i): x for i, x in enumerate(value)}


def _axis_names(entry: Leaf) -> tuple[Any, ...]:
    """Returns the names of the axes in a box of metadata; () without one."""
    if isinstance(entry, NNXMeta):
        names = entry.metadata.get("out_sharding")
        return tuple(getattr(names, "spec", names) or ())
    if meta.is_axis_metadata(entry):
        get_partition_spec = getattr(entry, "get_partition_spec", tuple)
        return tuple(get_partition_spec())
    return ()


def _layout(entry: Leaf) -> jax.sharding.PartitionSpec:
    names = _axis_names(entry)
    if isinstance(entry, logical.LogicallyPartitioned):
        return (
            logical.logical_to_mesh_axes(names, entry.rules)
            or jax.sharding.PartitionSpec()
        )
    variable_rules = None
    if isinstance(entry, NNXMeta):
        variable_rules = entry.metadata.get("sharding_rules")
    rules = composite_rules(get_logical_axis_rules(), variable_rules)
    return logical.names_to_mesh_axes(names, rules)


def _spec(entry: PyTree, *, is_state: bool) -> PyTree:
    """Returns the specs of the arrays of a collection's entry, which may be in a box."""
    layout, names = _layout(entry), _axis_names(entry)
    is_logical = (
        isinstance(entry, logical.LogicallyPartitioned)
        or tuple(layout) != names
    )

    def spec(value: jax.ShapeDtypeStruct) -> ParameterSpec:
        logical_axes = pad_axes(names, len(value.shape)) if is_logical else None
        weight_decay_scale = 0.0 if is_state else None
        return ParameterSpec(
            shape=value.shape,
            dtype=value.dtype,
            mesh_axes=layout,
            weight_decay_scale=weight_decay_scale,
            logical_axes=logical_axes,
            is_state=is_state,
        )

    return jax.tree.map(spec, meta.unbox(entry))


def as_hierarchy(
    x: models.Layer, /, *args: PyTree, inputs: PyTree = (), **kwargs: PyTree
) -> Any:
    """Returns the config of a hierarchy layer that wraps a layer of any library.

    Its parameters have the mesh axes of the layer's axis metadata. Changes that a call makes, such
    as batch statistics, update the hierarchy's state. The layer is called in training or evaluation
    mode, see `weft.interop.models.add_mode`.

    Args:
        x: the layer, see `weft.interop.model_of`; a class of layers; or a config of either, such as
            one of `config_for_class`. Configs of hierarchy layers are returned unchanged.
        inputs: arrays or `jax.ShapeDtypeStruct` of a call, which determine parameter shapes.

    Raises UnknownLayerError on instantiation, if the library of `x` is unknown.

    >>> cfg = as_hierarchy(nn.Dense, 2, inputs=(jax.ShapeDtypeStruct((1, 3), "float32"),))
    >>> layer = cfg.set(name="head").instantiate(parent=None)
    >>> layer.create_parameter_specs_recursively()["params"]["kernel"].shape
    (3, 2)
    """
    if isinstance(x, Module.Config):
        return x.clone(**kwargs)
    if isinstance(x, type) and issubclass(x, Module):
        return x.default_config().set(**kwargs)
    inputs = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    return InHierarchy.default_config().set(
        layer=x, args=args, kwargs=kwargs, inputs=inputs
    )


def as_child_config(x: models.Layer) -> config_lib.InstantiableConfig:
    """Returns the config of a child that is not the config of a module, see `Module._add_child`."""
    if not isinstance(x, functions.CallConfig):
        return as_hierarchy(x)
    if isinstance(x, functions.ClassConfigBase) and models.adapter_of(x.klass):
        return as_hierarchy(x)
    if {"name", "parent"} <= set(x.keys()):
        return x  # of a function that makes a module
    return as_hierarchy(x)
