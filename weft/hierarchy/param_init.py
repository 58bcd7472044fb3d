"""Initializers of parameters.

A layer's `param_init` defaults to a `DefaultInitializer`, which goes by the parameter's name:
weights keep the variance of activations (by their fans), biases start at 0, scales at 1.
"""

import enum
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from weft import config, errors
from weft.config import REQUIRED, Configurable, InstantiableConfig, Required
from weft.functional.arrays import as_tuple
from weft.functional.initializers import DISTRIBUTIONS, draw, fan_sizes
from weft.typing import (
    ArrayLike,
    DistributionName,
    DType,
    FanName,
    Shape,
    Tensor,
)

PARAM_REGEXP_WEIGHT = ".*weight$"
"""Matches the paths of weights, in a `DefaultInitializer`."""
PARAM_REGEXP_BIAS = ".*bias$"
"""Matches the paths of biases."""
PARAM_REGEXP_SCALE = ".*scale$"
"""Matches the paths of scales."""

Axes = int | Sequence[int]


class FanAxes(NamedTuple):
    """Input, output and batch axes of a weight; an axis equals a tuple of it, in any order.

    All other axes are a receptive field, such as a convolution's window. Batch axes are those of
    independent weights, such as the layers of a stack.
    """

    in_axis: Axes
    out_axis: Axes
    batch_axis: Axes | None = ()

    class AxisType(enum.Enum):
        """Type of an axis."""

        IN_AXIS = "in_axis"
        OUT_AXIS = "out_axis"
        BATCH_AXIS = "batch_axis"
        NONE = None
        """None of these, such as an axis of a window."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FanAxes) and self._sets() == other._sets()

    def _sets(self) -> list[frozenset[int]]:
        return [frozenset(axes) for axes in self.tuples()]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(tuple(self._sets()))

    def canonicalize(self) -> "FanAxes":
        """Returns a copy in which every field is a tuple, for None without an axis."""
        return FanAxes(*self.tuples())

    def tuples(self) -> list[tuple[int, ...]]:
        """Returns the axes of each type."""
        return [() if axes is None else as_tuple(axes) for axes in self]

    def prepend_axis(self, *, axis_type: "FanAxes.AxisType") -> "FanAxes":
        """Returns the axes after a new axis 0 of this type is added.

        >>> FanAxes(-2, 1).prepend_axis(axis_type=FanAxes.AxisType.BATCH_AXIS)
        FanAxes(in_axis=(-2,), out_axis=(2,), batch_axis=(0,))
        """
        shifted = [
            _shift(axes, 1, lambda axis: axis >= 0) for axes in self.tuples()
        ]
        return FanAxes(*shifted)._with(0, axis_type)

    def append_axis(self, *, axis_type: "FanAxes.AxisType") -> "FanAxes":
        """Returns the axes after a new last axis of this type is added."""
        shifted = [
            _shift(axes, -1, lambda axis: axis < 0) for axes in self.tuples()
        ]
        return FanAxes(*shifted)._with(-1, axis_type)

    def _with(self, axis: int, axis_type: "FanAxes.AxisType") -> "FanAxes":
        name = axis_type.value
        if name is None:
            return self
        axes: Any = getattr(self, name)
        axes = (axis, *axes) if axis == 0 else (*axes, axis)
        return self._replace(**{name: axes})


def _shift(
    axes: tuple[int, ...], shift: int, is_shifted: Callable[[int], bool]
) -> tuple[int, ...]:
    """Returns axes after another one was added, which shifts those that count from its end."""
    return tuple(axis + shift if is_shifted(axis) else axis for axis in axes)


def maybe_prepend_axis(
    fan_axes: FanAxes | None, *, axis_type: FanAxes.AxisType
) -> FanAxes | None:
    """Returns `fan_axes.prepend_axis(...)`, or None for None."""
    if fan_axes is None:
        return None
    return fan_axes.prepend_axis(axis_type=axis_type)


class Initializer(Configurable):
    """Base of initializers."""

    def initialize(
        self,
        name: str,
        *,
        prng_key: Tensor,
        shape: Shape,
        dtype: DType,
        axes: FanAxes | None = None,
    ) -> Tensor:
        """Returns an initial value of the parameter `name` of a layer, drawn with its own key."""
        raise errors.ParameterInitError(
            f"{type(self).__name__} does not define `initialize`, which {name!r} needs."
        )

    def debug_string(
        self,
        name: str | None = None,
        shape: Shape | None = None,
        axes: FanAxes | None = None,
    ) -> str:
        """Returns a formula of the distribution."""
        return type(self).__name__


class ConstantInitializer(Initializer):
    """Initializer with a constant."""

    class Config(Initializer.Config):
        """Configures a ConstantInitializer; `value` is a number or an array that broadcasts."""

        value: Required[Any] = REQUIRED

    def initialize(self, name, *, prng_key, shape, dtype, axes=None):
        return jnp.broadcast_to(jnp.asarray(self.config.value, dtype), shape)

    def debug_string(self, name=None, shape=None, axes=None):
        return f"constant({self.config.value})"


class GaussianInitializer(Initializer):
    """Initializer with independent normal values."""

    class Config(Initializer.Config):
        """Configures a GaussianInitializer; a `mean` of None is 0."""

        std: Required[float] = REQUIRED
        mean: float | None = None

    def initialize(self, name, *, prng_key, shape, dtype, axes=None):
        cfg = self.config
        values = jax.random.normal(prng_key, shape, dtype) * jnp.asarray(
            cfg.std, dtype
        )
        if cfg.mean is not None:
            values = values + jnp.asarray(cfg.mean, dtype)
        return values

    def debug_string(self, name=None, shape=None, axes=None):
        return f"normal({self.config.mean or 0}, {self.config.std}^2)"


class WeightInitializer(Initializer):
    """Initializer with variance `scale / fan`, which preserves that of activations or gradients.

    With `fan=None`, `scale` is the standard deviation, or the bound of a "uniform" distribution.
    For fan_in see [He et al., 2015](https://arxiv.org/abs/1502.01852); for fan_avg Glorot and
    Bengio, 2010.
    """

    class Config(Initializer.Config):
        """Configures a WeightInitializer."""

        fan: FanName | None = "fan_avg"
        """One of "fan_in", "fan_out", "fan_avg" or None."""
        scale: float = 1.0
        """Factor of the variance; with fan=None, of the value."""
        distribution: DistributionName = "uniform"
        """One of "uniform", "normal" or "truncated_normal"."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        if cfg.distribution not in DISTRIBUTIONS:
            raise errors.ParameterInitError(
                f"distribution={cfg.distribution!r} is unknown; expected one of {DISTRIBUTIONS}."
            )
        if cfg.fan not in (None, "fan_in", "fan_out", "fan_avg"):
            raise errors.ParameterInitError(
                f"fan={cfg.fan!r} is unknown; expected 'fan_in', 'fan_out', 'fan_avg' or None."
            )

    def initialize(self, name, *, prng_key, shape, dtype, axes=None):
        scale = self._scale(name, shape, axes)
        return draw(
            prng_key,
            shape,
            dtype,
            distribution=self.config.distribution,
            scale=scale,
        )

    def _scale(
        self, name: str | None, shape: Shape, axes: FanAxes | None
    ) -> float:
        cfg = self.config
        if cfg.fan is None:
            return cfg.scale
        if axes is None:
            raise errors.ParameterInitError(
                f"{name!r} of shape {shape} has no fan axes, which fan={cfg.fan!r} needs; "
                "set `fan_axes=FanAxes(in_axis=..., out_axis=...)` in its ParameterSpec."
            )
        variance = cfg.scale / fans(shape, axes)[cfg.fan]
        if cfg.distribution == "uniform":
            # A uniform distribution within ±b has the variance b²/3.
            return math.sqrt(3 * variance)
        return math.sqrt(variance)

    def debug_string(self, name=None, shape=None, axes=None):
        cfg = self.config
        is_uniform = cfg.distribution == "uniform"
        scale = f"{cfg.scale}"
        if cfg.fan is not None:
            fan = cfg.fan
            if shape is not None and axes is not None:
                fan = fans(shape, axes)[cfg.fan]
            factor = "3 * " if is_uniform else ""
            scale = f"sqrt({factor}{cfg.scale} / {fan})"
        if is_uniform:
            return f"uniform(-{scale}, {scale})"
        return f"{cfg.distribution}(0, {scale}^2)"


def fans(shape: Shape, axes: FanAxes) -> dict[str, float]:
    """Returns the sizes "fan_in" and "fan_out" of a weight, and their mean "fan_avg".

    A receptive field counts towards both.
    """
    in_axes, out_axes, batch_axes = axes.tuples()
    return fan_sizes(
        shape, in_axes=in_axes, out_axes=out_axes, batch_axes=batch_axes
    )


class DefaultInitializer(Initializer):
    """Initializer that chooses another one for each parameter, by its name."""

    class Config(Initializer.Config):
        """Configures a DefaultInitializer.

        `init_by_param_name` has initializers by a regular expression that must match the whole
        name. Default for other names: weights uniform by fan_avg, biases 0, scales 1, which are
        among those of the initializer's `config`.
        """

        init_by_param_name: dict[str, InstantiableConfig] = {}

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        by_default = {
            PARAM_REGEXP_WEIGHT: WeightInitializer.default_config(),
            PARAM_REGEXP_BIAS: ConstantInitializer.default_config().set(
                value=0.0
            ),
            PARAM_REGEXP_SCALE: ConstantInitializer.default_config().set(
                value=1.0
            ),
        }
        rules = cfg.init_by_param_name
        # The first match applies, so that these rules come first, also in place of a default.
        self._rule_configs = {**rules, **by_default, **rules}
        self._rules = {
            regex: init.instantiate()
            for regex, init in self._rule_configs.items()
        }

    @property
    def config(self) -> Any:
        """Config of this initializer, with the rules that hold by default."""
        # Computed when it is asked for: each layer makes an initializer.
        return super().config.clone(init_by_param_name=self._rule_configs)

    def _initializer_of(self, name: str) -> Initializer:
        for regex, initializer in self._rules.items():
            if re.fullmatch(regex, name):
                return initializer
        raise errors.ParameterInitError(
            f"no initializer for a parameter named {name!r}; expected a name that matches one of "
            f"{list(self._rules)}. Set `initializer` in its ParameterSpec, or add a rule: "
            f"`param_init.init_by_param_name={{{name!r}: ...}}`."
        )

    def initialize(self, name, *, prng_key, shape, dtype, axes=None):
        init = self._initializer_of(name)
        return init.initialize(
            name, prng_key=prng_key, shape=shape, dtype=dtype, axes=axes
        )

    def debug_string(self, *, name, shape=None, axes=None):
        return self._initializer_of(name).debug_string(
            name=name, shape=shape, axes=axes
        )


def initializer_of_weights(
    initializer: InstantiableConfig,
) -> DefaultInitializer.Config:
    """Returns the config of a DefaultInitializer that initializes weights by `initializer`."""
    rules = {PARAM_REGEXP_WEIGHT: initializer}
    return DefaultInitializer.default_config().set(init_by_param_name=rules)


def normal_weights(
    fan: FanName | None, scale: float = 1.0
) -> DefaultInitializer.Config:
    """Returns the config of a DefaultInitializer with a normal WeightInitializer for weights."""
    weight = WeightInitializer.default_config().set(
        fan=fan, scale=scale, distribution="normal"
    )
    return initializer_of_weights(weight)


class PerGroupInitializer(Initializer):
    """Initializer that draws equal parts of the last axis as independent weights.

    For fused projections, so that each has the variance of a separate weight.
    """

    class Config(Initializer.Config):
        """Configures a PerGroupInitializer; `num_groups` must divide the last axis."""

        initializer: InstantiableConfig = DefaultInitializer.default_config()
        num_groups: int = 1

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._initializer: Any = config.maybe_instantiate(cfg.initializer)

    def initialize(self, name, *, prng_key, shape, dtype, axes=None):
        num_groups = self.config.num_groups
        if not shape or shape[-1] % num_groups:
            raise errors.ParameterInitError(
                f"{name!r} of shape {tuple(shape)} cannot be drawn in {num_groups} groups; its "
                "last axis must be a multiple of num_groups."
            )
        group_shape = (*shape[:-1], shape[-1] // num_groups)

        def draw_group(key: Tensor) -> Tensor:
            return self._initializer.initialize(
                name, prng_key=key, shape=group_shape, dtype=dtype, axes=axes
            )

        # The new axis of groups comes before the last, which both then become.
        draw_groups = jax.vmap(draw_group, out_axes=len(shape) - 1)
        return draw_groups(jax.random.split(prng_key, num_groups)).reshape(
            shape
        )

    def debug_string(self, name=None, shape=None, axes=None):
        group_text = self._initializer.debug_string(
            name=name, shape=shape, axes=axes
        )
        return f"{self.config.num_groups} * [{group_text}]"


def constant_initializer(value: ArrayLike) -> Initializer:
    """Returns a ConstantInitializer of `value`."""
    return ConstantInitializer.default_config().set(value=value).instantiate()


def gaussian_initializer(std: float) -> Initializer:
    """Returns a GaussianInitializer of mean 0."""
    return GaussianInitializer.default_config().set(std=std).instantiate()


def truncated_normal(stddev: float = 1e-2, dtype: DType = jnp.float32):
    """Returns `init(key, shape, dtype)`, truncated normal with the final deviation `stddev`."""

    def init(key: Tensor, shape: Shape, dtype: DType = dtype) -> Tensor:
        return draw(
            key, shape, dtype, distribution="truncated_normal", scale=stddev
        )

    return init


def uniform(scale: float = 1.0, dtype: DType = jnp.float32):
    """Returns `init(key, shape, dtype)`, uniform values within `±scale`."""

    def init(key: Tensor, shape: Shape, dtype: DType = dtype) -> Tensor:
        return draw(key, shape, dtype, distribution="uniform", scale=scale)

    return init
