"""Layers: modules that describe and initialize their parameters but do not hold them.

The parameters of a layer that runs one child several times are stacked: their specs have a leading
axis, which is replicated and counts as a batch axis of the fans, and each copy is initialized with
its own key. The subtree is a `VDict`, so that optimizers can separate the copies.
"""

import contextlib
import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax.core
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from weft import config, errors, struct
from weft.core import display, logical
from weft.functional import (
    cast_floats,
    check_sizes,
    fp8_dot_general,
    int8_dot_general,
)
from weft.hierarchy import context_kind, parameter_spec, transforms
from weft.hierarchy.context import (
    child_context,
    fold_in_name,
    set_current_context,
)
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.module import Module, get_public_method, mark_method, nowrap
from weft.hierarchy.param_init import DefaultInitializer, FanAxes, Initializer
from weft.hierarchy.parameter_spec import (
    NestedParameterSpec,
    ParameterSpec,
    TensorSpec,
)
from weft.typing import DType, NestedTensor, PyTree, QuantizationName, Tensor


class TensorStats(Module):
    """Base of statistics of named arrays."""

    def add_stats(self, name: str, value: Tensor) -> None:
        """Adds summaries about an array called `name` in its layer; this base class adds none."""


class TensorRMSNorm(TensorStats):
    """Reports the root mean square."""

    def add_stats(self, name: str, value: Tensor) -> None:
        self.add_summary(
            "rms_norm",
            jnp.sqrt(jnp.mean(jnp.square(value.astype(jnp.float32)))),
        )


class TensorMaxAbs(TensorStats):
    """Reports the maximum absolute value."""

    def add_stats(self, name: str, value: Tensor) -> None:
        self.add_summary("max_abs", jnp.max(jnp.abs(value)).astype(jnp.float32))


class CompositeTensorStats(TensorStats):
    """Reports several statistics."""

    class Config(TensorStats.Config):
        """Configures CompositeTensorStats.

        `inline_child_summaries` omits names of statistics from the paths of summaries.
        """

        tensor_stats: dict[str, TensorStats.Config] = {}
        inline_child_summaries: bool = False

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for name, child in cfg.tensor_stats.items():
            self._add_child(name, child)

    def add_stats(self, name: str, value: Tensor) -> None:
        context = self.get_invocation_context()
        for child_name, child in self.children.items():
            child.add_stats(name, value)  # pyright: ignore[reportAttributeAccessIssue]
            if self.config.inline_child_summaries:
                child_summaries = context.get_summaries().pop(child_name)
                for summary_name, summary in child_summaries.items():
                    self.add_summary(summary_name, summary)


class DefaultTensorStats(CompositeTensorStats):
    """Reports the root mean square and the maximum absolute value."""

    class Config(CompositeTensorStats.Config):
        """Configures DefaultTensorStats."""

        tensor_stats: dict[str, TensorStats.Config] = {
            "norm": TensorRMSNorm.default_config(),
            "max": TensorMaxAbs.default_config(),
        }
        inline_child_summaries: bool = True


def stacked_parameter_specs(
    layer: "BaseLayer", sizes: tuple[int, ...]
) -> dict[str, Any]:
    """Returns the specs of copies of a layer along leading axes of these sizes.

    Without sizes, they are those of the layer itself.
    """
    specs = layer.create_parameter_specs_recursively()
    for size in reversed(sizes):
        specs = struct.VDict(
            jax.tree.map(
                lambda spec, n=size: parameter_spec.with_leading_axis(spec, n),
                specs,
            )
        )
    return specs


def initialize_stacked(
    layer: "BaseLayer",
    sizes: tuple[int, ...],
    prng_key: Tensor,
    *,
    prebuilt: NestedTensor | None = None,
) -> dict[str, Any]:
    """Initializes the parameters of copies of a layer along leading axes of these sizes.

    Without sizes, they are those of the layer itself.

    Args:
      prng_key: split for each copy, so that the first copies do not depend on their number.
      prebuilt: as for `initialize_parameters_recursively`, with leading axes of copies.

    Raises ParameterSpecError if a value in `prebuilt` has a wrong leading axis or shape.
    """
    if not sizes:
        return layer.initialize_parameters_recursively(
            prng_key, prebuilt=prebuilt
        )
    n, *inner_sizes = sizes
    prebuilt = dict(prebuilt or {})
    for path, value in jax.tree_util.tree_leaves_with_path(prebuilt):
        if np.shape(value)[:1] != (n,):
            raise errors.ParameterSpecError(
                f"prebuilt {layer.path()}{jax.tree_util.keystr(path)} has shape "
                f"{np.shape(value)}; expected a leading axis of {n}, one entry per copy of "
                f"{layer.path()}."
            )
    # A loop slices the arrays; specs cannot go through it.
    prebuilt_leaves, structure = jax.tree.flatten(prebuilt)
    stacked_arrays = [
        None if _is_spec(leaf) else leaf for leaf in prebuilt_leaves
    ]

    def initialize_copy(
        key: Tensor, arrays: list[Tensor | None]
    ) -> NestedTensor:
        copy_leaves: list[Any] = []
        for leaf, array in zip(prebuilt_leaves, arrays, strict=True):
            if array is None:
                copy_leaves.append(
                    jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype or float)
                )
            else:
                copy_leaves.append(array)
        prebuilt_copy = structure.unflatten(copy_leaves)
        return initialize_stacked(
            layer, tuple(inner_sizes), key, prebuilt=prebuilt_copy
        )

    keys = context_kind.fork_key(prng_key, n)
    if isinstance(prng_key, jax.core.Tracer):
        # A loop compiles for one copy, in 0.4 x the compile time of vmap.
        per_copy = (keys, stacked_arrays)
        return struct.VDict(
            jax.lax.map(lambda args: initialize_copy(*args), per_copy)
        )
    # Outside of a compiled function, a loop would be recompiled at each call.
    copies: list[NestedTensor] = []
    for i in range(n):
        arrays = jax.tree.map(operator.itemgetter(i), stacked_arrays)
        copies.append(initialize_copy(keys[i], arrays))
    return struct.VDict(jax.tree.map(lambda *xs: jnp.stack(xs), *copies))


def _is_spec(x: PyTree) -> bool:
    return isinstance(x, TensorSpec | jax.ShapeDtypeStruct)


F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
T = TypeVar("T")


class ParameterNoise(config.Configurable):
    """Perturbation of a layer's parameters before each training step."""

    def apply(self, prng_key: Tensor, params: NestedTensor) -> NestedTensor:
        """Returns the perturbed parameters of a layer and its descendants, by default unchanged."""
        return params


@dataclasses.dataclass(frozen=True)
class RematSpec:
    """Parts of a layer's forward pass to recompute in the backward pass.

    Attributes:
        prevent_cse: as for `jax.checkpoint`; False is right, and faster, inside a scan.
        policy: one of `jax.checkpoint_policies`, or a config of one; None keeps nothing.
    """

    prevent_cse: bool = True
    policy: Any = None


def no_remat(fn: F) -> F:
    """Exempts a method from its layer's `remat_spec`."""
    return mark_method(fn, "_weft_no_remat", "no_remat")


class Parameters(dict[str, Any]):
    """State of a layer, with an error for a missing entry that lists the entries."""

    def __init__(self, state: NestedTensor, path: str):
        super().__init__(state)
        self._path = path

    def __missing__(self, name: str) -> Any:
        raise errors.MissingStateError(
            f"{self._path} has no parameter {name!r} in its state, which has "
            f"{sorted(map(str, self))}. {errors.did_you_mean(name, self)} Was the state made by "
            "this model's `initialize_parameters_recursively`?"
        )


_PRODUCTS = {
    "int8": int8_dot_general,
    "fp8": fp8_dot_general,
    "off": jax.lax.dot_general,
}


class BaseLayer(Module):
    """Module with parameters.

    A subclass describes them in `_create_layer_parameter_specs` and reads `self.parameters[name]`.
    """

    class Config(Module.Config):
        """Configures a BaseLayer."""

        dtype: DType | None = None
        """Of the parameters; None for that of the parent layer, float32 at the root."""
        compute_dtype: DType | None = None
        """Of the computation, to which the layer casts its floating-point inputs and parameters,
        but not its state; None for that of the parent layer, at the root for no cast. Softmaxes,
        norms and losses are computed in float32 nevertheless."""
        output_dtype: DType | None = None
        """Of the layer's floating-point outputs; None for the parent's `compute_dtype` if this
        layer has one of its own."""
        quantization: QuantizationName | None = None
        """Of matrix products with the weights of linear layers, attention's projections and
        experts: "int8" or "fp8", see `weft.functional.int8_dot_general`; "off" for none, None for
        that of the parent layer. It holds for modules of Linen and NNX inside, as
        `weft.functional.default_dot_general`."""
        param_init: DefaultInitializer.Config | None = None
        """Initializes the parameters; None for that of the parent layer."""
        param_partition_spec: (
            NestedParameterSpec | PartitionSpec | Any | None
        ) = None
        """The mesh axes of the layer's main weight, one entry per axis."""
        param_noise: ParameterNoise.Config | None = None
        remat_spec: RematSpec | None = None
        """What to recompute in the backward pass; None keeps everything."""
        tensor_stats: TensorStats.Config | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._param_init: Any = config.maybe_instantiate(cfg.param_init)
        self._param_noise = config.maybe_instantiate(cfg.param_noise)
        if cfg.quantization not in (None, *_PRODUCTS):
            raise errors.InvalidConfigValueError(
                f"{self.path()} has quantization={cfg.quantization!r}; expected one of "
                f"{', '.join(map(repr, _PRODUCTS))}, or None for that of the layer around it. "
                f"{errors.did_you_mean(str(cfg.quantization), _PRODUCTS)}"
            )
        self._dot_general: Callable[..., Tensor] | None = None
        if cfg.quantization is not None:
            self._dot_general = _PRODUCTS[cfg.quantization]
        elif isinstance(parent, BaseLayer):
            self._dot_general = parent.dot_general()
        self._casts = (
            cfg.compute_dtype is not None or cfg.output_dtype is not None
        )
        if cfg.tensor_stats is not None:
            self._add_child("tensor_stats", cfg.tensor_stats)

    @nowrap
    def dtype(self) -> DType:
        """Returns the dtype of the layer's parameters."""
        if self.config.dtype is not None:
            return self.config.dtype
        if isinstance(self.parent, BaseLayer):
            return self.parent.dtype()
        return jnp.float32

    @nowrap
    def compute_dtype(self) -> DType | None:
        """Returns the dtype of the layer's computation; None for that of its inputs."""
        if self.config.compute_dtype is not None:
            return self.config.compute_dtype
        if isinstance(self.parent, BaseLayer):
            return self.parent.compute_dtype()
        return None

    @nowrap
    def dot_general(self) -> Callable[..., Tensor] | None:
        """Returns the product with weights by the layer's quantization; None if it has none."""
        return self._dot_general

    @nowrap
    def param_init(self) -> Initializer:
        """Returns the initializer of the layer's parameters."""
        if self._param_init is not None:
            return self._param_init
        if isinstance(self.parent, BaseLayer):
            return self.parent.param_init()
        return DefaultInitializer.default_config().instantiate()

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        """Returns the specs of the layer's own parameters, without those of its children."""
        return {}

    def _compute_fan_axes(
        self, name: str, spec: ParameterSpec
    ) -> FanAxes | None:
        if name.endswith("weight") and len(spec.shape) >= 2:
            return FanAxes(in_axis=-2, out_axis=-1)
        return None

    def _own_parameter_specs(self) -> dict[str, ParameterSpec]:
        """Returns the specs of the layer's own parameters, with all that they leave to it."""
        path = self.path()
        cfg = self.config
        size_names = [name for name in cfg.keys() if name.endswith("_dim")]  # noqa: SIM118
        check_sizes(path, **{name: getattr(cfg, name) for name in size_names})
        specs: dict[str, ParameterSpec] = {}
        for name, spec in self._create_layer_parameter_specs().items():
            check_sizes(f"{path}.{name}", shape=tuple(spec.shape))
            axis_names = tuple(spec.partition_spec)
            try:
                mesh_axes = logical.names_to_mesh_axes(axis_names)
            except errors.LogicalAxisError as error:
                raise errors.LogicalAxisError(
                    f"{path}.{name}: {error}"
                ) from None
            if name in self._children:
                raise errors.ParameterSpecError(
                    f"{path} has both a parameter and a child named {name!r}; rename one of them."
                )
            # Names that the rules have changed are logical, and kept for a later mesh.
            logical_axes = (
                spec.logical_axes
                if tuple(mesh_axes) == axis_names
                else axis_names
            )
            specs[name] = dataclasses.replace(
                spec,
                dtype=self.dtype() if spec.dtype is None else spec.dtype,
                mesh_axes=mesh_axes,
                logical_axes=logical_axes,
                initializer=spec.initializer or self.param_init(),
                fan_axes=spec.fan_axes or self._compute_fan_axes(name, spec),
            )
        return specs

    def _shown_size(self) -> str:
        # A layer that is wrong has a text too.
        with contextlib.suppress(Exception):
            specs = self.create_parameter_specs_recursively()
            if jax.tree.leaves(specs):
                arrays = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), specs
                )
                return f" # {display.format_size(arrays)}"
        return ""

    def _shown_parts(self) -> dict[str, Any]:
        parts = super()._shown_parts()
        with contextlib.suppress(Exception):
            for name, spec in self._create_layer_parameter_specs().items():
                dtype = jnp.dtype(spec.dtype or self.dtype()).name
                axes = spec.mesh_axes if any(spec.partition_spec) else None
                parts[name] = ParameterSpec(
                    spec.shape, dtype, axes, is_state=spec.is_state
                )
        return parts

    def _stacked_sizes(self, name: str) -> tuple[int, ...]:
        """Returns the sizes of the leading axes along which a child's parameters are stacked."""
        return ()

    @nowrap
    def create_parameter_specs_recursively(self) -> dict[str, Any]:
        """Returns the specs of all parameters of the layer and below, nested as the state.

        Raises ParameterSpecError if a spec contradicts itself, naming the parameter.
        """
        specs: dict[str, Any] = dict(self._own_parameter_specs())
        for name, child in self._children.items():
            if isinstance(child, BaseLayer):
                specs[name] = stacked_parameter_specs(
                    child, self._stacked_sizes(name)
                )
        return specs

    @nowrap
    def initialize_parameters_recursively(
        self, prng_key: Tensor, *, prebuilt: NestedTensor | None = None
    ) -> dict[str, Any]:
        """Initializes all parameters of the layer and its descendants.

        A parameter's key is `prng_key` with its path folded in, whatever the rest of the model.

        Args:
            prebuilt: values to use instead, nested as the state; missing or None entries are
                initialized, and specs stand for values that exist elsewhere: the result is None.

        Raises:
            ParameterSpecError: if a prebuilt value has the wrong shape, or matches no parameter.
            ParameterInitError: if no initializer fits a parameter.
        """
        prebuilt_entries: dict[str, Any] = dict(prebuilt or {})
        state: dict[str, Any] = {}
        for name, spec in self._own_parameter_specs().items():
            prebuilt_value = prebuilt_entries.pop(name, None)
            state[name] = self._initialize_parameter(
                name, spec, prng_key, prebuilt_value
            )
        for name, child in self._children.items():
            if isinstance(child, BaseLayer):
                state[name] = initialize_stacked(
                    child,
                    self._stacked_sizes(name),
                    fold_in_name(prng_key, name),
                    prebuilt=prebuilt_entries.pop(name, None),
                )
        if prebuilt_entries:
            unknown_name = next(iter(prebuilt_entries))
            raise errors.ParameterSpecError(
                f"prebuilt has {sorted(map(str, prebuilt_entries))} for {self.path()}, which has "
                f"no such parameters or children. {errors.did_you_mean(unknown_name, state)}"
            )
        return state

    def _initialize_parameter(
        self,
        name: str,
        spec: ParameterSpec,
        prng_key: Tensor,
        prebuilt: PyTree,
    ) -> Tensor | None:
        if prebuilt is None:
            assert (
                spec.initializer is not None
            )  # filled in by _own_parameter_specs
            return spec.initializer.initialize(
                name,
                prng_key=fold_in_name(prng_key, name),
                shape=tuple(spec.shape),
                dtype=spec.dtype,
                axes=spec.fan_axes,
            )
        if tuple(np.shape(prebuilt)) != tuple(spec.shape):
            raise errors.ParameterSpecError(
                f"prebuilt {self.path()}.{name} has the shape {np.shape(prebuilt)}; "
                f"expected {tuple(spec.shape)}."
            )
        return None if _is_spec(prebuilt) else prebuilt

    @nowrap
    def apply_parameter_noise_recursively(
        self, prng_key: Tensor, params: NestedTensor
    ) -> NestedTensor:
        """Returns the parameters with each layer's `param_noise` applied, each with its own key."""
        noisy: Any = copy.copy(params)  # a stack stays marked as one
        for name, child in self._children.items():
            if isinstance(child, BaseLayer) and name in noisy:
                key = fold_in_name(prng_key, name)
                noisy[name] = child.apply_parameter_noise_recursively(
                    key, noisy[name]
                )
        if self._param_noise is not None:
            noisy = self._param_noise.apply(prng_key, noisy)
        return noisy

    @nowrap
    def cast_parameters_recursively(self, params: NestedTensor) -> NestedTensor:
        """Returns the parameters in the compute dtype of each layer, and state unchanged."""
        cast: Any = copy.copy(params)  # a stack stays marked as one
        for name, child in self._children.items():
            if isinstance(child, BaseLayer) and name in cast:
                cast[name] = child.cast_parameters_recursively(cast[name])
        for name, spec in self._own_parameter_specs().items():
            if name in cast and not spec.is_state:
                cast[name] = cast_floats(cast[name], self.compute_dtype())
        return cast

    @property
    def parameters(self) -> Parameters:
        """The layer's state in the current invocation."""
        return Parameters(self.state, self.path())

    @nowrap
    def require_prng_key(self, what: str) -> Tensor:
        """Returns the PRNG key of this invocation; raises MissingPrngKeyError, naming `what`."""
        if self.prng_key is None:
            raise errors.MissingPrngKeyError(
                f"{what} of {self.path()} needs a PRNG key and the invocation has none; "
                "pass prng_key= to `functional`."
            )
        return self.prng_key

    def _in_context(self, method: Callable[..., R]) -> Callable[..., R]:
        spec = self.config.remat_spec
        if (
            spec is not None
            and self.is_training
            and not getattr(method, "_weft_no_remat", False)
        ):
            policy = config.maybe_instantiate(spec.policy)
            method = transforms.remat(
                method, prevent_cse=spec.prevent_cse, policy=policy
            )
        return self._with_casts(method)

    def _cast_inputs(self, inputs: T) -> T:
        """Returns the inputs of a layer with a compute dtype of its own in this dtype."""
        return cast_floats(inputs, self.compute_dtype())

    def _with_casts(self, method: Callable[..., R]) -> Callable[..., R]:
        if not self._casts:
            return method
        cfg = self.config
        output_dtype = cfg.output_dtype
        if output_dtype is None and isinstance(self.parent, BaseLayer):
            output_dtype = self.parent.compute_dtype()

        def call(layer: BaseLayer, *args: PyTree, **kwargs: PyTree) -> R:
            context = layer.get_invocation_context()
            if cfg.compute_dtype is not None:
                context.state = layer.cast_parameters_recursively(context.state)
                args, kwargs = layer._cast_inputs((args, kwargs))
            return cast_floats(method(layer, *args, **kwargs), output_dtype)

        return call

    def _add_tensor_stats(self, name: str, value: Tensor) -> Tensor:
        """Adds summaries about an array, as `tensor_stats` says, and returns it."""
        if "tensor_stats" in self._children:
            # Summaries are below `tensor_stats/{name}`, a context for each array.
            stats_context = self.get_invocation_context().child_view(
                "tensor_stats"
            )
            with (
                set_current_context(stats_context),
                child_context(name, module=self.tensor_stats),
            ):
                self.tensor_stats.add_stats(name, value)
        return value

    def _add_activation_summary(
        self,
        *,
        name: str,
        activations: Tensor,
        activation_paddings: Tensor | None = None,
    ) -> None:
        """Adds the mean and the root mean square of activations as summaries.

        They are called `activations/{name}_mean` and `activations/{name}_norm`.

        Args:
            activations: `Float[Array, "batch ..."]`; each example counts equally.
            activation_paddings: `Num[Array, "batch time"]`, 1 at padding: then each position that
                is not padding counts equally.
        """
        is_live: Tensor | bool = True
        num_live: Tensor | int = len(activations)
        num_live_axes = 1
        if activation_paddings is not None:
            live = 1 - activation_paddings.astype(activations.dtype)
            is_live = live > 0
            num_live = jnp.sum(live)
            num_live_axes = live.ndim
        # All axes but those of the examples, or of the positions.
        axes = tuple(range(num_live_axes, activations.ndim))
        mean = jnp.mean(activations, axis=axes)
        norm = jnp.sqrt(jnp.mean(jnp.square(activations), axis=axes))
        for kind, values in (("mean", mean), ("norm", norm)):
            total = jnp.sum(jnp.where(is_live, values, 0))
            average = total / jnp.maximum(1, num_live)
            self.add_summary(
                f"activations/{name}_{kind}", WeightedScalar(average, num_live)
            )

    def _remat_name(self, x: Tensor, name: str) -> Tensor:
        """Names a value for policies that keep values by name, as `<layer class>.<name>`."""
        return checkpoint_name(x, f"{type(self).__name__}.{name}")


class BaseModel(BaseLayer):
    """Layer that computes a loss from a batch. A subclass defines `forward`."""

    def forward(
        self, input_batch: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns the loss, a scalar, and a dict of auxiliary outputs such as logits."""
        raise NotImplementedError(type(self))


class RedirectToSharedModule(BaseLayer):
    """Layer without parameters that calls a module shared by an ancestor.

    For example, an output layer with the weights of the embedding: the decoder calls
    `_share_with_descendants(self.emb, shared_module_name="shared_emb")`, and a layer below it uses

        RedirectToSharedModule.default_config().set(
            shared_module="shared_emb", method_map={"forward": "attend"}
        )

    as output layer, whose `forward` is the embedding's `attend`.
    """

    class Config(BaseLayer.Config):
        """Configures a RedirectToSharedModule.

        `method_map` maps methods of this layer to those of the shared module; empty is `forward`.
        """

        shared_module: config.Required[str] = config.REQUIRED
        method_map: dict[str, str] = {}

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for name, target in (cfg.method_map or {"forward": "forward"}).items():
            if name != "forward" and (
                name.startswith("_") or hasattr(BaseLayer, name)
            ):
                raise errors.LayerMethodError(
                    f"{self.path()} cannot redirect {name!r} of its method_map; expected 'forward' "
                    "or a new public name."
                )
            setattr(self, name, functools.partial(self.redirect, target))

    def redirect(self, target: str, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the method called `target` of the shared module."""
        shared = self.get_shared_module(self.config.shared_module).module
        method = get_public_method(shared, target)
        if method is None:
            raise errors.LayerMethodError(
                f"{self.path()} redirects to {target!r} of {shared.path()}, but "
                f"{type(shared).__name__} has no public method of that name; "
                "change method_map."
            )
        return method(*args, **kwargs)
