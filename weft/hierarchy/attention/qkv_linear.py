"""Projections to queries, keys and values, their scales, and projections from heads to the output.

A projection's weight has shape `(model_dim, num_heads, per_head_dim)` in both directions. The
projections to queries, keys and values are separate (`QKVLinear`, `GroupedQKVLinear`), fused into
one weight (`FusedQKVLinear`, `FusedGroupedQKVLinear`), or for queries only (`QLinear`, with keys
and values of another layer); `RoFormerQKVLinear` in `rope.py` wraps any of them.

Queries and keys have norms and scales before their inner product. Scaling queries by
1/sqrt(per_head_dim) is cheaper than scaling logits; keys may take part of it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from weft import functional
from weft.config import (
    REQUIRED,
    InstantiableConfig,
    Required,
    config_for_function,
)
from weft.errors import ArgumentValueError, LayerConfigError
from weft.hierarchy import base_layer, context, param_init, transforms
from weft.hierarchy.attention.kv_cache import KVState
from weft.hierarchy.module import Module, nowrap
from weft.hierarchy.parameter_spec import (
    constant_spec,
    maybe_shard,
    num_parts,
    weight_and_bias_specs,
)
from weft.hierarchy.stored_weight import StoredWeightLayer
from weft.typing import Tensor


class BaseMultiheadLinear(StoredWeightLayer):
    """Base of linear maps between the model dimension and the heads."""

    class Config(StoredWeightLayer.Config):
        model_dim: Required[int] = REQUIRED
        num_heads: Required[int] = REQUIRED
        per_head_dim: Required[int] = REQUIRED
        bias: bool = True
        param_partition_spec: Any = (None, "model", None)

    _subscripts: ClassVar[str]
    _fan_axes: ClassVar[param_init.FanAxes]
    _bias_axes: ClassVar[slice]  # the axes of the weight that the bias has

    def _create_layer_parameter_specs(
        self,
    ) -> dict[str, base_layer.ParameterSpec]:
        cfg = self.config
        shape = (cfg.model_dim, cfg.num_heads, cfg.per_head_dim)
        return weight_and_bias_specs(
            cfg, shape, ("row", None, "col"), bias_axes=self._bias_axes
        )

    def _compute_fan_axes(
        self, name: str, spec: base_layer.ParameterSpec
    ) -> param_init.FanAxes | None:
        return self._fan_axes if name == "weight" else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Projects the last axis or axes of `Float[Array, "batch time ..."]`."""
        parameters = self.parameters
        bias = parameters["bias"] if self.config.bias else None

        def product(inputs: Tensor, weight: Tensor) -> Tensor:
            return functional.project(
                self._subscripts,
                inputs,
                weight,
                bias,
                dot_general=self.dot_general(),
            )

        return self._with_weight(product, inputs, parameters)


class MultiheadInputLinear(BaseMultiheadLinear):
    """Projection from the model dimension to the heads."""

    _subscripts = "...d,dnh->...nh"
    _fan_axes = param_init.FanAxes(in_axis=0, out_axis=(1, 2))
    _bias_axes = slice(1, None)

    def project_stacked(self, inputs: Tensor) -> list[Tensor]:
        """Returns the projections of weights and biases that are stacked along a leading axis."""
        parameters = self.parameters
        bias = parameters["bias"] if self.config.bias else None

        def product(inputs: Tensor, weight: Tensor) -> Tensor:
            return functional.project(
                "...d,dknh->...knh",
                inputs,
                jnp.moveaxis(weight, 0, 1),
                bias,
                dot_general=self.dot_general(),
            )

        outputs = self._with_weight(product, inputs, parameters)
        axis = outputs.ndim - 3
        # The gradient of a split is a concatenation, but that of slices a sum of padded arrays.
        return [
            x.squeeze(axis)
            for x in jax.lax.split(outputs, (1,) * outputs.shape[axis], axis)
        ]


class MultiheadOutputLinear(BaseMultiheadLinear):
    """Projection from the heads to the model dimension, still the weight's first axis."""

    _subscripts = "...nh,dnh->...d"
    _fan_axes = param_init.FanAxes(in_axis=(1, 2), out_axis=0)
    _bias_axes = slice(1)


_DIMS = ("query_dim", "key_dim", "value_dim", "num_heads", "per_head_dim")


class BaseQKVLinear(base_layer.BaseLayer):
    """Base of projections to queries, keys and values."""

    class Config(base_layer.BaseLayer.Config):
        """Configures a BaseQKVLinear with the sizes of the vectors to project."""

        query_dim: Required[int] = REQUIRED
        key_dim: Required[int] = REQUIRED
        value_dim: Required[int] = REQUIRED
        num_heads: Required[int] = REQUIRED
        per_head_dim: Required[int] = REQUIRED

    class Output(NamedTuple):
        """Queries, keys and values.

        Attributes:
          query: `Float[Array, "batch target heads per_head_dim"]`.
          key, value: `Float[Array, "batch source kv_heads per_head_dim"]`.
        """

        query: Tensor
        key: Tensor
        value: Tensor

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.config.num_heads

    @classmethod
    def is_kv_sharing(cls, cfg: "BaseQKVLinear.Config") -> bool:
        """Returns whether a config of this class uses keys and values of another layer."""
        return False

    def _add_projection(
        self, name: str, *, model_dim: int, num_heads: int
    ) -> None:
        dims = {"model_dim": model_dim, "num_heads": num_heads}
        self._add_child(
            name,
            self.config.layer.set(
                **dims, per_head_dim=self.config.per_head_dim
            ),
        )

    def _with_dims(
        self, layer: "BaseQKVLinear.Config"
    ) -> "BaseQKVLinear.Config":
        """Returns the config of a projection inside of this one, with the sizes of this one."""
        dims: dict[str, Any] = {x: getattr(self.config, x) for x in _DIMS}
        return layer.set(**dims)

    def _check_equal_dims(self, alternative: str) -> None:
        cfg = self.config
        if not cfg.query_dim == cfg.key_dim == cfg.value_dim:
            raise LayerConfigError(
                f"{self.path()}: query_dim={cfg.query_dim}, key_dim={cfg.key_dim} and "
                f"value_dim={cfg.value_dim} must be equal to share one weight; use {alternative}."
            )

    def _inputs(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_state: KVState | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the inputs of the projections; key defaults to query, value to key."""
        if kv_state is not None:
            raise ArgumentValueError(
                f"{self.path()} is a {type(self).__name__}, which projects keys and values itself, "
                "but was given kv_state; omit it, or set input_linear to "
                "QLinear.default_config()."
            )
        if key is None:
            key = query
        if value is None:
            value = key
        return query, key, value

    def forward(
        self,
        query: Tensor,
        *,
        key: Tensor | None = None,
        value: Tensor | None = None,
        kv_state: KVState | None = None,
        query_positions: Tensor | None = None,
    ) -> Output:
        """Projects to queries, keys and values.

        Args:
          query: `Float[Array, "batch target query_dim"]`.
          key: `Float[Array, "batch source key_dim"]`; None for `query`.
          value: `Float[Array, "batch source value_dim"]`; None for `key`.
          kv_state: keys and values of another layer, for layers that share them.
          query_positions: `Int[Array, "batch target"]`, for layers that depend on positions.
        """
        raise NotImplementedError(type(self))


class QKVLinear(BaseQKVLinear):
    """Three separate projections."""

    class Config(BaseQKVLinear.Config):
        """Configures a QKVLinear; `layer` is the config of each projection."""

        layer: MultiheadInputLinear.Config = (
            MultiheadInputLinear.default_config()
        )
        query_partition_spec: jax.sharding.PartitionSpec | None = None
        key_partition_spec: jax.sharding.PartitionSpec | None = None
        value_partition_spec: jax.sharding.PartitionSpec | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        kv_heads = self.num_kv_heads
        self._add_projection(
            "q_proj", model_dim=cfg.query_dim, num_heads=cfg.num_heads
        )
        self._add_projection(
            "k_proj", model_dim=cfg.key_dim, num_heads=kv_heads
        )
        self._add_projection(
            "v_proj", model_dim=cfg.value_dim, num_heads=kv_heads
        )

    def forward(
        self,
        query,
        *,
        key=None,
        value=None,
        kv_state=None,
        query_positions=None,
    ):
        cfg = self.config
        query, key, value = self._inputs(query, key, value, kv_state)
        return self.Output(
            query=maybe_shard(self.q_proj(query), cfg.query_partition_spec),
            key=maybe_shard(self.k_proj(key), cfg.key_partition_spec),
            value=maybe_shard(self.v_proj(value), cfg.value_partition_spec),
        )


class BaseGroupedQKVLinear(BaseQKVLinear):
    """Base of projections with fewer heads of keys and values, `num_kv_heads` of the config."""

    def __init__(self, cfg: Any, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.num_heads % cfg.num_kv_heads:
            raise LayerConfigError(
                f"{self.path()}: num_heads={cfg.num_heads} is not a multiple of num_kv_heads="
                f"{cfg.num_kv_heads}; each key head is shared by equally many query heads."
            )

    @property
    def num_kv_heads(self) -> int:
        return self.config.num_kv_heads


class GroupedQKVLinear(BaseGroupedQKVLinear, QKVLinear):
    """Three separate projections, with fewer heads of keys and values (Ainslie et al., 2023).

    On a mesh that splits heads into more parts than there are of keys, the weights of keys and
    values are not split by heads.
    """

    class Config(QKVLinear.Config):
        """Configures a GroupedQKVLinear; `num_kv_heads` divides `num_heads`."""

        num_kv_heads: Required[int] = REQUIRED

    @nowrap
    def create_parameter_specs_recursively(self) -> dict[str, Any]:
        """Returns the specs of all parameters of the layer and below, nested as the state."""
        specs = super().create_parameter_specs_recursively()
        for name in ("k_proj", "v_proj"):
            specs[name] = jax.tree.map(self._with_whole_heads, specs[name])
        return specs

    def _with_whole_heads(
        self, spec: base_layer.ParameterSpec
    ) -> base_layer.ParameterSpec:
        entries = list(spec.partition_spec)
        for axis, size in enumerate(spec.shape):
            if size == self.num_kv_heads and size % num_parts(entries[axis]):
                entries[axis] = None
        if entries == list(spec.partition_spec):
            return spec
        return dataclasses.replace(
            spec, mesh_axes=jax.sharding.PartitionSpec(*entries)
        )


class FusedQKVLinear(BaseQKVLinear):
    """Single projection whose weight `(3, model_dim, num_heads, per_head_dim)` holds all three."""

    class Config(BaseQKVLinear.Config):
        """Configures a FusedQKVLinear; `layer` is the config of one of three projections."""

        layer: MultiheadInputLinear.Config = (
            MultiheadInputLinear.default_config()
        )

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._check_equal_dims("QKVLinear")
        self._add_projection(
            "qkv_proj", model_dim=cfg.query_dim, num_heads=cfg.num_heads
        )

    def _stacked_sizes(self, name: str) -> tuple[int, ...]:
        return (3,) if name == "qkv_proj" else super()._stacked_sizes(name)

    def forward(
        self,
        query,
        *,
        key=None,
        value=None,
        kv_state=None,
        query_positions=None,
    ):
        inputs = self._inputs(query, key, value, kv_state)
        if key is None and value is None:
            if type(self.qkv_proj) is MultiheadInputLinear:
                return self.Output(*self.qkv_proj.project_stacked(query))
            with context.child_context("qkv_proj"):
                project_all = transforms.vmap(
                    self.qkv_proj.forward, in_axes=None, axis_size=3
                )
                return self.Output(*project_all(query))
        outputs = []
        for i, x in enumerate(inputs):
            stacked_state = dict(self.parameters["qkv_proj"])
            state = jax.tree.map(lambda p, i=i: p[i], stacked_state)
            with context.child_context(
                f"{'qkv'[i]}_proj", module=self.qkv_proj, state=state
            ):
                outputs.append(self.qkv_proj(x))
        return self.Output(*outputs)


class FusedGroupedQKVLinear(BaseGroupedQKVLinear):
    """Single projection to the concatenated heads of queries, keys and values.

    The mesh axes that split heads divide the number of all of these.
    """

    class Config(BaseQKVLinear.Config):
        """Configures a FusedGroupedQKVLinear."""

        num_kv_heads: Required[int] = REQUIRED
        """Number of key heads, which divides `num_heads`."""
        layer: MultiheadInputLinear.Config = (
            MultiheadInputLinear.default_config()
        )
        output_partition_spec: jax.sharding.PartitionSpec | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._check_equal_dims("GroupedQKVLinear")
        num_heads = cfg.num_heads + 2 * cfg.num_kv_heads
        self._add_projection(
            "qkv_proj", model_dim=cfg.query_dim, num_heads=num_heads
        )

    @nowrap
    def create_parameter_specs_recursively(self) -> dict[str, Any]:
        """Returns the specs of all parameters of the layer and below, nested as the state.

        Raises LayerConfigError if the mesh cannot split the heads into equal parts.
        """
        specs = super().create_parameter_specs_recursively()
        num_heads = self.qkv_proj.config.num_heads
        for spec in jax.tree.leaves(specs):
            if spec.shape[-2:-1] == (num_heads,):
                self._check_divides(num_heads, spec.partition_spec[-2])
        return specs

    @nowrap
    def _check_divides(self, num_heads: int, mesh_axes: Any) -> None:
        parts = num_parts(mesh_axes)
        if num_heads % parts == 0:
            return
        cfg = self.config
        raise LayerConfigError(
            f"{self.path()} is a FusedGroupedQKVLinear with num_heads={cfg.num_heads} and twice "
            f"num_kv_heads={cfg.num_kv_heads}, {num_heads} heads in all, which the mesh axis "
            f"{mesh_axes!r} cannot split into {parts} equal parts; use GroupedQKVLinear, with "
            "which devices share heads of keys and values, or a mesh that divides them."
        )

    def forward(
        self,
        query,
        *,
        key=None,
        value=None,
        kv_state=None,
        query_positions=None,
    ):
        cfg = self.config
        self._inputs(query, key, value, kv_state)
        if key is not None or value is not None:
            raise ArgumentValueError(
                f"{self.path()} is a FusedGroupedQKVLinear, which projects keys and values from "
                "the input of queries, but was given key or value; use GroupedQKVLinear."
            )
        heads = maybe_shard(self.qkv_proj(query), cfg.output_partition_spec)
        ends = (cfg.num_heads, cfg.num_heads + cfg.num_kv_heads)
        return self.Output(*jnp.split(heads, ends, axis=-2))


class QLinear(BaseQKVLinear):
    """Projection to queries only; keys and values come from another layer."""

    class Config(BaseQKVLinear.Config):
        layer: MultiheadInputLinear.Config = (
            MultiheadInputLinear.default_config()
        )

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_projection(
            "q_proj", model_dim=cfg.query_dim, num_heads=cfg.num_heads
        )

    @classmethod
    def is_kv_sharing(cls, cfg: BaseQKVLinear.Config) -> bool:
        return True

    def forward(
        self,
        query: Tensor,
        *,
        kv_state: KVState,
        key: Tensor | None = None,
        value: Tensor | None = None,
        query_positions: Tensor | None = None,
    ) -> BaseQKVLinear.Output:
        """Projects to queries; keys and values are those of `kv_state`.

        Raises:
          ArgumentValueError: if `kv_state` is missing, or `key` or `value` is given.
        """
        if kv_state is None or key is not None or value is not None:
            raise ArgumentValueError(
                f"{self.path()} is a QLinear, which takes keys and values from another layer: pass "
                "that layer's kv_state, and neither key nor value. A layer returns it if "
                'return_aux contains "kv_state".'
            )
        return self.Output(self.q_proj(query), kv_state.k_proj, kv_state.v_proj)


ScaleFn = Callable[[int], float]
"""Factor of queries or keys as a function of `per_head_dim`."""


def constant_scale_fn(value: float) -> ScaleFn:
    """Returns a ScaleFn with the same factor for every dimension.

    >>> constant_scale_fn(2.0)(64)
    2.0
    """
    return lambda per_head_dim: value


def pow_scale_fn(exp: float) -> ScaleFn:
    """Returns a ScaleFn that is a power of the dimension.

    >>> pow_scale_fn(-0.5)(64)
    0.125
    """
    return lambda per_head_dim: per_head_dim**exp


class PerDimScale(base_layer.BaseLayer):
    """Learned positive factor for each dimension, initially 1."""

    class Config(base_layer.BaseLayer.Config):
        dim: Required[int] = REQUIRED
        param_partition_spec: Any = (None,)

    def _create_layer_parameter_specs(
        self,
    ) -> dict[str, base_layer.ParameterSpec]:
        cfg = self.config
        return {
            "param": constant_spec(
                (cfg.dim,), mesh_axes=cfg.param_partition_spec
            )
        }

    def forward(self, x: Tensor) -> Tensor:
        """Scales the last axis, of size `dim`."""
        return functional.per_dim_scale(x, self.parameters["param"])


class BaseScaleQK(base_layer.BaseLayer):
    """Base of scales of queries or keys."""

    class Config(base_layer.BaseLayer.Config):
        per_head_dim: Required[int] = REQUIRED

    def forward(self, proj: Tensor, *, positions: Tensor | None) -> Tensor:
        """Scales queries or keys, `Float[Array, "batch time heads per_head_dim"]`.

        Scales that depend on positions use `positions`, `Int[Array, "#batch time"]`.
        """
        raise NotImplementedError(type(self))


class _NormAndScale(BaseScaleQK):
    """Base of scales with a norm and a factor, the fields `norm` and `scale_factor`."""

    @staticmethod
    def default_scale_factor_config() -> InstantiableConfig[ScaleFn]:
        """Returns the default of `scale_factor`."""
        raise NotImplementedError

    def __init__(self, cfg: Any, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        scale_factor = cfg.scale_factor or self.default_scale_factor_config()
        self._scale = scale_factor.instantiate()(cfg.per_head_dim)
        self._maybe_add_child("norm", cfg.norm, input_dim=cfg.per_head_dim)

    def apply_norm(self, proj: Tensor) -> Tensor:
        """Normalizes if a norm is configured."""
        if self.config.norm is None:
            return proj
        return self.norm(proj)

    def apply_scale_factor(self, proj: Tensor) -> Tensor:
        return proj * self._scale


class ScaleQuery(_NormAndScale):
    """Norm, learned scale per dimension and factor of queries, in this order."""

    class Config(BaseScaleQK.Config):
        """Configures a ScaleQuery; `scale_factor` None is `per_head_dim ** -0.5`."""

        norm: InstantiableConfig | None = None
        per_dim_scale: PerDimScale.Config | None = None
        scale_factor: InstantiableConfig[ScaleFn] | None = None

    @staticmethod
    def default_scale_factor_config() -> InstantiableConfig[ScaleFn]:
        return config_for_function(pow_scale_fn).set(exp=-0.5)

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._maybe_add_child(
            "per_dim_scale", cfg.per_dim_scale, dim=cfg.per_head_dim
        )

    def apply_per_dim_scale(self, proj: Tensor) -> Tensor:
        """Scales each dimension if a `per_dim_scale` is configured."""
        if self.config.per_dim_scale is None:
            return proj
        return self.per_dim_scale(proj)

    def forward(self, proj: Tensor, *, positions: Tensor | None) -> Tensor:
        return self.apply_scale_factor(
            self.apply_per_dim_scale(self.apply_norm(proj))
        )


class ScaleKey(_NormAndScale):
    """Norm and factor of keys."""

    class Config(BaseScaleQK.Config):
        """Configures a ScaleKey; `scale_factor` None is 1."""

        norm: InstantiableConfig | None = None
        scale_factor: InstantiableConfig[ScaleFn] | None = None

    @staticmethod
    def default_scale_factor_config() -> InstantiableConfig[ScaleFn]:
        return config_for_function(constant_scale_fn).set(value=1.0)

    def forward(self, proj: Tensor, *, positions: Tensor | None) -> Tensor:
        return self.apply_norm(proj) * self._scale
