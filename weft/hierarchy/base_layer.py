"""Layers: modules that describe and initialize parameters but do not hold them."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from weft.config import Configurable, config_class, maybe_instantiate
from weft.config.names import did_you_mean
from weft.core.logical import names_to_mesh_axes
from weft.errors import (
    LogicalAxisError,
    MissingPrngKeyError,
    MissingStateError,
    ParameterSpecError,
)
from weft.functional.sizes import check_sizes
from weft.hierarchy import transforms
from weft.hierarchy.context import child_context, fold_in_name
from weft.hierarchy.module import Module, nowrap
from weft.hierarchy.param_init import DefaultInitializer, FanAxes
from weft.hierarchy.parameter_spec import (
    FactorizationSpec,
    NestedParameterSpec,
    ParameterSpec,
    TensorSpec,
    with_leading_axis,
)
from weft.hierarchy.stacking import initialize_copies, parameter_specs_of_copies
from weft.hierarchy.tensor_stats import (
    CompositeTensorStats,
    DefaultTensorStats,
    TensorMaxAbs,
    TensorRMSNorm,
    TensorStats,
)
from weft.typing import DType, NestedTensor, Tensor

__all__ = [
    "BaseLayer",
    "CompositeTensorStats",
    "DefaultTensorStats",
    "FactorizationSpec",
    "NestedParameterSpec",
    "ParameterNoise",
    "ParameterSpec",
    "RematSpec",
    "TensorMaxAbs",
    "TensorRMSNorm",
    "TensorSpec",
    "TensorStats",
    "no_remat",
    "with_leading_axis",
]

F = TypeVar("F", bound=Callable[..., Any])


class ParameterNoise(Configurable):
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
    fn._weft_no_remat = True  # pyright: ignore[reportFunctionMemberAccess]
    return fn


class Parameters(dict[str, Any]):
    """State of a layer, with an error for a missing entry that lists the entries."""

    def __init__(self, state: NestedTensor, path: str):
        super().__init__(state)
        self._path = path

    def __missing__(self, name: str) -> Any:
        raise MissingStateError(
            f"{self._path} has no parameter {name!r} in its state, which has "
            f"{sorted(self)}. {did_you_mean(name, self)} Was the state made by this model's "
            "`initialize_parameters_recursively`?"
        )


class BaseLayer(Module):
    """Module with parameters.

    A subclass describes them in `_create_layer_parameter_specs` and reads them in its methods as
    `self.parameters[name]`.
    """

    @config_class
    class Config(Module.Config):
        """Configures a BaseLayer.

        Attributes:
            dtype: of the parameters; None for that of the parent layer, float32 at the root.
            param_init: initializes the parameters; None for that of the parent layer.
            param_partition_spec: the mesh axes of the layer's main weight, one entry per axis.
            param_noise: perturbs the parameters in training.
            remat_spec: what to recompute in the backward pass; None keeps everything.
            tensor_stats: the statistics of activations to report.
        """

        dtype: DType | None = None
        param_init: DefaultInitializer.Config | None = None
        param_partition_spec: NestedParameterSpec | PartitionSpec | Any | None = None
        param_noise: ParameterNoise.Config | None = None
        remat_spec: RematSpec | None = None
        tensor_stats: TensorStats.Config | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._param_init = maybe_instantiate(cfg.param_init)
        self._param_noise = maybe_instantiate(cfg.param_noise)
        if cfg.tensor_stats is not None:
            self._add_child("tensor_stats", cfg.tensor_stats)

    @nowrap
    def dtype(self) -> DType:
        """Returns the dtype of the layer's parameters."""
        if self.config.dtype is not None:
            return self.config.dtype
        return self.parent.dtype() if isinstance(self.parent, BaseLayer) else jnp.float32

    @nowrap
    def param_init(self) -> Any:
        """Returns the initializer of the layer's parameters."""
        if self._param_init is not None:
            return self._param_init
        if isinstance(self.parent, BaseLayer):
            return self.parent.param_init()
        return DefaultInitializer.default_config().instantiate()

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        """Returns the specs of the layer's own parameters, without those of its children."""
        return {}

    def _compute_fan_axes(self, name: str, spec: ParameterSpec) -> FanAxes | None:
        """Returns the input and output axes of a parameter whose spec has none."""
        if name.endswith("weight") and len(spec.shape) >= 2:
            return FanAxes(in_axis=-2, out_axis=-1)
        return None

    def _own_parameter_specs(self) -> dict[str, ParameterSpec]:
        specs, path = {}, self.path()
        check_sizes(path, **{k: v for k, v in self.config.items() if k.endswith("_dim")})
        for name, spec in self._create_layer_parameter_specs().items():
            check_sizes(f"{path}.{name}", shape=tuple(spec.shape))
            names = tuple(spec.partition_spec)
            try:
                mesh_axes = names_to_mesh_axes(names)
            except LogicalAxisError as error:
                raise LogicalAxisError(f"{self.path()}.{name}: {error}") from None
            if name in self._children:
                raise ParameterSpecError(
                    f"{self.path()} has both a parameter and a child named {name!r}; rename one "
                    "of them."
                )
            specs[name] = dataclasses.replace(
                spec,
                dtype=self.dtype() if spec.dtype is None else spec.dtype,
                mesh_axes=mesh_axes,
                logical_axes=spec.logical_axes if tuple(mesh_axes) == names else names,
                initializer=spec.initializer or self.param_init(),
                fan_axes=spec.fan_axes or self._compute_fan_axes(name, spec),
            )
        return specs

    def _num_copies(self, name: str) -> int | None:
        """Returns the number of stacked copies of a child's parameters; None if not stacked."""
        return None

    @nowrap
    def create_parameter_specs_recursively(self) -> dict[str, Any]:
        """Returns the specs of all parameters of the layer and below, nested as the state.

        Raises:
            ParameterSpecError: if a spec contradicts itself, naming the parameter.
        """
        specs: dict[str, Any] = dict(self._own_parameter_specs())
        for name, child in self._children.items():
            if isinstance(child, BaseLayer):
                specs[name] = parameter_specs_of_copies(child, self._num_copies(name))
        return specs

    @nowrap
    def initialize_parameters_recursively(
        self, prng_key: Tensor, *, prebuilt: NestedTensor | None = None
    ) -> dict[str, Any]:
        """Initializes all parameters of the layer and its descendants.

        The key of a parameter is `prng_key` with the names on its path folded in, independent of
        the rest of the model.

        Args:
            prebuilt: values to use instead, nested as the state; missing or None entries are
              initialized.

        Raises:
            ParameterSpecError: if a prebuilt value has the wrong shape, or matches no parameter.
            ParameterInitError: if no initializer fits a parameter.
        """
        given: dict[str, Any] = dict(prebuilt or {})
        state: dict[str, Any] = {}
        for name, spec in self._own_parameter_specs().items():
            state[name] = self._initialize_parameter(name, spec, prng_key, given.pop(name, None))
        for name, child in self._children.items():
            if isinstance(child, BaseLayer):
                state[name] = initialize_copies(
                    child,
                    self._num_copies(name),
                    fold_in_name(prng_key, name),
                    prebuilt=given.pop(name, None),
                )
        if given:
            raise ParameterSpecError(
                f"prebuilt has {sorted(given)} for {self.path()}, which has no such parameters "
                f"or children. {did_you_mean(next(iter(given)), state)}"
            )
        return state

    def _initialize_parameter(
        self, name: str, spec: ParameterSpec, prng_key: Tensor, prebuilt: Any
    ) -> Tensor:
        if prebuilt is None or isinstance(prebuilt, ParameterSpec):
            assert spec.initializer is not None  # filled in by _own_parameter_specs
            return spec.initializer.initialize(
                name,
                prng_key=fold_in_name(prng_key, name),
                shape=tuple(spec.shape),
                dtype=spec.dtype,
                axes=spec.fan_axes,
            )
        if tuple(jnp.shape(prebuilt)) != tuple(spec.shape):
            raise ParameterSpecError(
                f"prebuilt {self.path()}.{name} has the shape {jnp.shape(prebuilt)}; "
                f"expected {tuple(spec.shape)}."
            )
        return prebuilt

    @nowrap
    def apply_parameter_noise_recursively(
        self, prng_key: Tensor, params: NestedTensor
    ) -> NestedTensor:
        """Returns the parameters with each layer's `param_noise` applied, each with its own key."""
        noisy: Any = copy.copy(params)  # a stack stays marked as one
        for name, child in self._children.items():
            if isinstance(child, BaseLayer) and name in noisy:
                noisy[name] = child.apply_parameter_noise_recursively(
                    fold_in_name(prng_key, name), noisy[name]
                )
        return noisy if self._param_noise is None else self._param_noise.apply(prng_key, noisy)

    @property
    def parameters(self) -> Parameters:
        """The layer's state in the current invocation."""
        return Parameters(self.state, self.path())

    @nowrap
    def require_prng_key(self, what: str) -> Tensor:
        """Returns the PRNG key of the current invocation, or raises MissingPrngKeyError.

        Args:
            what: what needs the key, for the error.
        """
        if self.prng_key is None:
            raise MissingPrngKeyError(
                f"{what} of {self.path()} needs a PRNG key and the invocation has none; "
                "pass prng_key= to `functional`."
            )
        return self.prng_key

    def _call_in_context(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        spec = self.config.remat_spec
        if spec is None or not self.is_training or getattr(method, "_weft_no_remat", False):
            return method(self, *args, **kwargs)
        return transforms.remat(
            lambda *args, **kwargs: method(self, *args, **kwargs),
            prevent_cse=spec.prevent_cse,
            policy=maybe_instantiate(spec.policy),
        )(*args, **kwargs)

    def _add_tensor_stats(self, name: str, value: Tensor) -> None:
        if "tensor_stats" in self._children:
            with child_context(f"tensor_stats_{name}", module=self.tensor_stats):
                self.tensor_stats.add_stats(name, value)

    def _remat_name(self, x: Tensor, name: str) -> Tensor:
        """Names a value for policies that keep values by name, as `<layer class>.<name>`."""
        return checkpoint_name(x, f"{type(self).__name__}.{name}")
