"""Dtypes of a trainer's numbers: of the parameters, the computation, and the optimizer's moments.

    name              parameters   computation   moments
    float32           float32      float32       float32
    mixed_bfloat16    float32      bfloat16      float32
    bfloat16          bfloat16     bfloat16      bfloat16
    int8              float32      float32       float32
    fp8               float32      float32       float32

The last two quantize the matrix products with weights, see `weft.functional.int8_dot_general` and
`fp8_dot_general`; the rest of the computation is in float32.
Whatever the policy, softmaxes, norms and losses are computed in float32, gradients of microbatches
are summed in float32, and so is the update of parameters and moments: what is stored in bfloat16 is
rounded once per step, stochastically.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from weft import config, functional
from weft.errors import InvalidConfigValueError, did_you_mean
from weft.functional import arrays
from weft.hierarchy.context import fold_in_name
from weft.trainer.optimizers import base
from weft.typing import DType, PyTree, QuantizationName, T, Tensor


class Precision(config.Configurable):
    """Policy for the dtypes of a trainer's numbers.

    >>> policy = as_precision("mixed_bfloat16")
    >>> policy.param_dtype, policy.compute_dtype
    ('float32', 'bfloat16')
    """

    class Config(config.Configurable.Config):
        """Configures a Precision."""

        param_dtype: DType | None = None
        """Dtype in which parameters are stored; None for that of the model. Layers with a `dtype`
        of their own keep it."""
        compute_dtype: DType | None = None
        """Dtype to which the model casts parameters and floating-point inputs; None for no cast.
        Layers with a `compute_dtype` of their own keep it."""
        quantization: QuantizationName | None = None
        """Of matrix products with weights, "int8" or "fp8"; None for that of the model. Layers with
        a `quantization` of their own keep it."""
        moment_dtype: DType | None = None
        """Dtype in which the optimizer's moments are stored, that is its arrays with the shape of a
        parameter; None for that of the optimizer. Moments of layers with a `dtype` of their own
        have at least that one's precision."""
        stochastic_rounding: bool = True
        """Whether to round parameters and moments stochastically where they are stored in bfloat16;
        False rounds to the nearest number."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.param_dtype = _checked("param_dtype", cfg.param_dtype)
        self.compute_dtype = _checked("compute_dtype", cfg.compute_dtype)
        self.moment_dtype = _checked("moment_dtype", cfg.moment_dtype)

    def model_config(self, model: Any) -> Any:
        """Returns the config of a model with this policy's parameters and computation."""
        fields = arrays.without_none(
            dtype=self.param_dtype,
            compute_dtype=self.compute_dtype,
            quantization=self.config.quantization,
        )
        for name, value in fields.items():
            if name not in model.keys():  # noqa: SIM118 - a config is not a mapping
                raise InvalidConfigValueError(
                    f"precision is to set {name}={value!r} of the model, but {model!r:.80} has no "
                    "such field; expected the config of a layer or of a library's module. Set "
                    "it inside of the function that makes it."
                )
        return model.clone(**fields)

    def with_stored_moments(self, state: T, params: PyTree) -> T:
        """Returns the state of an optimizer, or its specs, with moments in their stored dtypes.

        Args:
            state: made for parameters in at least float32.
            params: the optimized parameters, or their specs.
        """
        if self.moment_dtype is None:
            return state
        params_by_path = base.leaves_by_path(params)

        def stored(path: tuple[Any, ...], x: Any) -> Any:
            param = base.parameter_of(path, x, params_by_path)
            if param is None or not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            dtype: Any = self.moment_dtype
            if self.param_dtype is not None and param.dtype != jnp.dtype(
                self.param_dtype
            ):
                dtype = jnp.promote_types(dtype, param.dtype)
            return base.with_dtype(x, dtype)

        return jax.tree_util.tree_map_with_path(stored, state)

    def round(
        self, x: Tensor, dtype: DType, key: Callable[[], Tensor]
    ) -> Tensor:
        """Rounds an array to a dtype, with a key that is made if needed."""
        if self.config.stochastic_rounding and dtype == jnp.bfloat16 != x.dtype:
            return functional.stochastic_round(x, key())
        return x.astype(dtype)

    def round_tree(self, tree: T, stored: T, key: Callable[[], Tensor]) -> T:
        """Rounds arrays to the dtypes of those in `stored`, each with a key of its own."""

        def rounded(path: tuple[Any, ...], x: Tensor, like: Tensor) -> Tensor:
            if x.dtype == like.dtype or not jnp.issubdtype(
                like.dtype, jnp.floating
            ):
                return x
            return self.round(
                x, like.dtype, lambda: fold_in_name(key(), base.path_name(path))
            )

        return jax.tree_util.tree_map_with_path(rounded, tree, stored)


def _checked(name: str, dtype: DType | None) -> DType | None:
    try:
        if dtype is None or jnp.issubdtype(dtype, jnp.floating):
            return dtype
    except TypeError:
        pass
    raise InvalidConfigValueError(
        f"precision.{name}={dtype!r} is not a floating-point dtype; expected one such as "
        "'float32' or 'bfloat16', or None."
    )


def _policy(
    stored: str, computed: str, quantization: QuantizationName | None = None
) -> Precision.Config:
    return Precision.default_config().set(
        param_dtype=stored,
        compute_dtype=computed,
        quantization=quantization,
        moment_dtype=stored,
    )


_POLICIES = {
    "float32": _policy("float32", "float32"),
    "mixed_bfloat16": _policy("float32", "bfloat16"),
    "bfloat16": _policy("bfloat16", "bfloat16"),
    "int8": _policy("float32", "float32", "int8"),
    "fp8": _policy("float32", "float32", "fp8"),
}


def as_precision(policy: str | Precision.Config) -> Precision:
    """Returns a policy by its name or from its config.

    Raises:
        InvalidConfigValueError: if there is no policy of this name, or a dtype is none of floats.
    """
    if isinstance(policy, str):
        if policy not in _POLICIES:
            raise InvalidConfigValueError(
                f"precision={policy!r} is not a policy. {did_you_mean(policy, _POLICIES)} For "
                "other combinations set the dtypes of a weft.trainer.Precision.Config."
            )
        policy = _POLICIES[policy]
    return policy.instantiate()
