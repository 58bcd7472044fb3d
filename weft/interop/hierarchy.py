"""Layers of the hierarchy in other models, and layers of other libraries in the hierarchy."""

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

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
from weft.hierarchy.module import Module, functional, get_public_method, nowrap
from weft.hierarchy.parameter_spec import pad_axes
from weft.interop import models
from weft.interop.models import Model, Path
from weft.interop.variables import NNXMeta
from weft.nnx.eager_sharding import use_eager_sharding
from weft.typing import DType


class HierarchyModel(Model):
    """A layer of the hierarchy.

    Its parameters are the collection `params`, except those that a call in training updates, which
    are the collection `state`. Its reports are in `summaries` and `module_outputs`.

    Args:
        config: of the layer, or a class of layers.
    """

    quantizes = True

    def __init__(self, config: Any, **kwargs: Any):
        _check_is_layer(config, kwargs)
        made = config.default_config() if isinstance(config, type) else config  # pyright: ignore[reportAttributeAccessIssue]
        self.config = made.clone(**kwargs)
        is_named = self.config.name is not config_lib.REQUIRED
        named = self.config if is_named else self.config.clone(name="layer")
        self._layer: Module = named.instantiate(parent=None)

    @property
    def name(self) -> str:
        return type(self._layer).__name__

    def _specs(self) -> dict[str, Any]:
        layer = self._layer
        is_layer = isinstance(layer, BaseLayer)
        return layer.create_parameter_specs_recursively() if is_layer else {}

    def _call(
        self,
        state: Any,
        key: jax.Array,
        training: bool | None,
        method: str | None,
        args: Any,
        kwargs: Any,
    ) -> Any:
        method = "forward" if method in (None, "__call__") else method
        fn = get_public_method(self._layer, method)
        if fn is None:
            raise errors.LayerMethodError(
                f"{self.name} has no method {method!r}; expected one such as 'forward'."
            )
        inputs = inspect.signature(fn).bind(*args, **kwargs).arguments if kwargs else args
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
        layer, key = self._layer, models.single_key(rngs, "params", "default")
        if not isinstance(layer, BaseLayer):
            return {}
        state = layer.initialize_parameters_recursively(key)
        arrays, fill = display.split_arrays((state, args, kwargs))

        def state_updates(arrays: list[Any], key: jax.Array) -> Any:
            state, args, kwargs = fill(arrays)
            return self._call(state, key, True, method, args, kwargs)[1].state_updates

        updated = flatten_dict(jax.eval_shape(state_updates, arrays, jax.random.key(0)))
        specs = flatten_dict(self._specs())
        return unflatten_dict(
            {
                ("state" if path in updated else "params", *path): _boxed(value, specs[path])
                for path, value in flatten_dict(state).items()
            }
        )

    def apply(self, variables, *args, rngs, mutable, training=None, method=None, **kwargs):
        specs = self._specs()
        given = {col: variables.get(col, {}) for col in ("params", "state")}
        places = {tuple(path): col for (col, *path) in flatten_dict(given)}
        values = {tuple(path): meta.unbox(x) for (_, *path), x in flatten_dict(given).items()}
        models.check_variables(self.name, flatten_dict(specs), values)
        key = models.single_key(rngs, "default", "dropout")
        state = jax.tree_util.tree_map_with_path(
            lambda path, _: values[tuple(entry.key for entry in path)], specs
        )
        out, side = self._call(state, key, training, method, args, kwargs)
        found: dict[Path, Any] = {
            (places.get(path, "state"), *path): x
            for path, x in flatten_dict(side.state_updates).items()
        }
        for col in ("summaries", "module_outputs"):
            found.update(((col, *path), x) for path, x in flatten_dict(getattr(side, col)).items())
        return out, unflatten_dict(
            {path: x for path, x in found.items() if filters.in_filter(mutable, path[0])}
        )


def _boxed(value: object, spec: ParameterSpec) -> Any:
    names = tuple(spec.logical_axes or spec.partition_spec)
    return _NamedAxes(value, names) if any(names) else value


class _NamedAxes(meta.Partitioned):
    """A parameter whose axes have names: mesh axes, or names that the context's rules map to some.

    The mesh is by default that of `jax.set_mesh`.
    """

    def unbox(self, apply_constraint: bool = True) -> Any:
        layout = logical.names_to_mesh_axes(self.names)
        return spmd.constrain(self.value, layout, self.mesh) if apply_constraint else self.value


def _check_is_layer(config: object, kwargs: Mapping[str, Any]) -> None:
    """Refuses modules that act outside of a run, and fields reserved for the layer's config."""
    cls = config if isinstance(config, type) else getattr(config, "klass", type(config))
    kept = needs_allow(cls)
    if kept and not issubclass(cls, BaseLayer):
        raise errors.UnknownLayerError(
            f"{cls.__name__} is not a layer: it acts outside of a model, such as by writing files; "
            "expected a subclass of BaseLayer, or a module that only computes."
        )
    set_here = {"klass", *(kept if isinstance(kept, frozenset) else ())} & set(kwargs)
    if set_here:
        raise errors.UnknownLayerError(
            f"{cls.__name__} was given {', '.join(sorted(set_here))} by name; set it in the "
            "layer's config."
        )


class InHierarchy(BaseLayer):
    """A layer of any library as a layer of the hierarchy; see `as_hierarchy`.

    Its state has the layer's collections by name. In an invocation, changes of them become state
    updates; new values sown into a collection `summaries` become summaries, others module outputs.
    A `dtype` set here or in an outer layer is that of the parameters; the layer itself defines
    their initialization and layout.
    """

    class Config(BaseLayer.Config):
        """Configures an InHierarchy.

        Attributes:
            layer: see `weft.interop.model_of`.
            args, kwargs: for a class of layers.
            inputs: of a call: arrays or `jax.ShapeDtypeStruct`.
        """

        layer: config_lib.Required[Any] = config_lib.REQUIRED
        args: tuple = ()
        kwargs: dict[str, Any] = {}
        inputs: config_lib.Required[tuple] = config_lib.REQUIRED

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        try:
            self._model = models.model_of(cfg.layer, *cfg.args, **cfg.kwargs)
        except errors.UnknownLayerError as error:
            raise errors.UnknownLayerError(f"{self.path()}: {error}") from error
        for name in ("param_init", "param_partition_spec"):
            if getattr(cfg, name) is not None:
                raise errors.ParameterSpecError(
                    f"{self.path()} has {name}={getattr(cfg, name)!r:.80}, but its parameters are "
                    f"those of {self._model.name}, a layer of another library, which says itself "
                    "how they begin and are laid out. Leave it out, and give that layer its "
                    "initializers, with the names of their axes."
                )
        if self.dot_general() not in (None, jax.lax.dot_general) and not self._model.quantizes:
            raise errors.InvalidConfigValueError(
                f"{self.path()} is to quantize matrix products, but it is {self._model.name}, a "
                "layer of another library, which computes them itself. Give its linear layers "
                "dot_general=weft.functional.int8_dot_general or fp8_dot_general where they are "
                "made; or set quantization='off' here."
            )
        self._variable_shapes: dict[Path, Any] | None = None

    def _make(self, key: jax.Array) -> dict[str, Any]:
        inputs = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x,
            self.config.inputs,
        )
        # As in training: statistics that only a batch can begin have to be made.
        try:
            with use_eager_sharding(False):  # that they are laid out is for the specs to say
                made = self._model.init({"default": key}, *inputs, training=True)
        except TypeError as error:
            if inputs:
                raise
            raise errors.LayerInputsError(
                f"{self.path()} holds a {self._model.name}, whose parameters follow from what it "
                f"is called with, and was given no inputs ({error}); say "
                "weft.interop.as_hierarchy(layer, inputs=(jax.ShapeDtypeStruct(shape, dtype),))."
            ) from error
        dtype = self._configured_dtype()
        return {
            col: cast_floats(entries, dtype) if self._model.trains(col) else entries
            for col, entries in made.items()
            if col not in _OUTPUT_COLLECTIONS
        }

    def _configured_dtype(self) -> DType | None:
        layer: Module | None = self
        while isinstance(layer, BaseLayer):
            if layer.config.dtype is not None:
                return layer.config.dtype
            layer = layer.parent
        return None

    def _variables(self) -> dict[Path, Any]:
        if self._variable_shapes is None:
            self._variable_shapes = flatten_dict(jax.eval_shape(self._make, jax.random.key(0)))
        return self._variable_shapes

    def _shown_parts(self) -> dict[str, Any]:
        parts = {"layer": self.config.layer, **super()._shown_parts()}
        with contextlib.suppress(Exception):  # a layer that is wrong has a text too
            parts |= self.create_parameter_specs_recursively()
        return parts

    @nowrap
    def create_parameter_specs_recursively(self) -> dict[str, Any]:
        return unflatten_dict(
            {
                _string_path(path): _spec(x, is_state=not self._model.trains(path[0]))
                for path, x in self._variables().items()
            }
        )

    @nowrap
    def initialize_parameters_recursively(
        self, prng_key, *, prebuilt: Mapping[str, Any] | None = None
    ):
        flat = flatten_dict(prebuilt or {})
        given = {p: x for p, x in flat.items() if x is not None}
        made = partial_eval(self._make, prng_key)  # without what the variables do not need
        state = _unboxed_values(made)
        for path, x in given.items():
            if path not in state or np.shape(x) != jnp.shape(state[path]):
                there = ", ".join(f"{models.path_text(p)} {jnp.shape(v)}" for p, v in state.items())
                raise errors.ParameterSpecError(
                    f"prebuilt has {models.path_text(path)!r} of shape {np.shape(x)} for "
                    f"{self.path()}, whose layer {self._model.name} has: {there}."
                )
        values = {p: None if isinstance(x, ParameterSpec) else x for p, x in given.items()}
        return unflatten_dict({**state, **values})

    @nowrap
    def cast_parameters_recursively(self, params: Any) -> Any:
        return {
            col: cast_floats(x, self.compute_dtype()) if self._model.trains(col) else x
            for col, x in params.items()
        }

    def forward(self, *args: object, **kwargs: Any) -> Any:
        """Calls the layer, or its public method named `method`, with the given arguments.

        Raises LayerMethodError if the method is private.
        """
        method = kwargs.get("method")
        if isinstance(method, str) and method.startswith("_") and method != "__call__":
            raise errors.LayerMethodError(
                f"{self.path()} is to call {method!r} of a {self._model.name}; name one of its "
                "public methods."
            )
        wanted = self._variables()
        state: Any = self.state
        given, real = flatten_dict(state), {_string_path(path): path for path in wanted}
        models.check_variables(
            self._model.name, {_string_path(p): meta.unbox(x) for p, x in wanted.items()}, given
        )
        trained = {col for col, *_ in real.values() if self._model.trains(col)}
        with use_eager_sharding(False), self._quantized():
            out, changed = self._model.apply(
                unflatten_dict({real[path]: x for path, x in given.items() if path in real}),
                *args,
                rngs={} if self.prng_key is None else {"default": self.prng_key},
                mutable=filters.DenyList(tuple(trained)),
                training=self.is_training,
                **kwargs,
            )
        self._add_outputs(_unboxed_values(changed), real)
        return out

    def _quantized(self) -> contextlib.AbstractContextManager[None]:
        own = self.dot_general()
        return contextlib.nullcontext() if own is None else default_dot_general(own)

    def _add_outputs(self, changed: dict[Path, Any], known: Mapping[Path, Any]) -> None:
        updates = unflatten_dict({path: x for path, x in changed.items() if path in known})
        for col, entries in updates.items():
            self.add_state_update(col, entries)
        new = unflatten_dict({path: x for path, x in changed.items() if path not in known})
        for name, value in new.pop("summaries", {}).items():
            self.add_summary(name, _sown_value(value))
        for name, value in {**new.pop("module_outputs", {}), **new}.items():
            self.add_module_output(name, value)


_OUTPUT_COLLECTIONS = ("summaries", "module_outputs", "intermediates")
"""Collections of what a call reports; they are not state."""


def _string_path(path: Path) -> tuple[str, ...]:
    return tuple(map(str, path))


def _unboxed_values(variables: Mapping[str, Any]) -> dict[Path, Any]:
    return {_string_path(path): meta.unbox(x) for path, x in flatten_dict(variables).items()}


def _sown_value(value: object) -> Any:
    """Returns the sown value, or a dict of them by number if there are several."""
    if isinstance(value, Mapping):
        return {name: _sown_value(below) for name, below in value.items()}
    if type(value) is tuple:
        return value[0] if len(value) == 1 else {str(i): x for i, x in enumerate(value)}
    return value


def _names(x: object) -> tuple[Any, ...]:
    if isinstance(x, NNXMeta):
        names = x.metadata.get("out_sharding")
        return tuple(getattr(names, "spec", names) or ())
    return tuple(getattr(x, "get_partition_spec", tuple)()) if meta.is_axis_metadata(x) else ()


def _layout(x: object) -> jax.sharding.PartitionSpec:
    names = _names(x)
    if isinstance(x, logical.LogicallyPartitioned):
        return logical.logical_to_mesh_axes(names, x.rules) or jax.sharding.PartitionSpec()
    own = x.metadata.get("sharding_rules") if isinstance(x, NNXMeta) else None
    return logical.names_to_mesh_axes(names, composite_rules(get_logical_axis_rules(), own))


def _spec(x: Any, *, is_state: bool) -> Any:
    layout, names = _layout(x), _names(x)
    is_logical = isinstance(x, logical.LogicallyPartitioned) or tuple(layout) != names
    scale = 0.0 if is_state else None

    def spec(value: Any) -> ParameterSpec:
        return ParameterSpec(
            shape=value.shape,
            dtype=value.dtype,
            mesh_axes=layout,
            weight_decay_scale=scale,
            logical_axes=pad_axes(names, len(value.shape)) if is_logical else None,
            is_state=is_state,
        )

    return jax.tree.map(spec, meta.unbox(x))


def as_hierarchy(x: object, /, *args: object, inputs: object = (), **kwargs: Any) -> Any:
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
    return InHierarchy.default_config().set(layer=x, args=args, kwargs=kwargs, inputs=inputs)


def as_child_config(x: Any) -> config_lib.InstantiableConfig:
    """Returns the config of a child that is not the config of a module, see `Module._add_child`."""
    is_layer = isinstance(x, functions.ClassConfigBase) and models.adapter_of(x.klass)
    makes_module = isinstance(x, functions.CallConfig) and {"name", "parent"} <= set(x.keys())
    return x if makes_module and not is_layer else as_hierarchy(x)
