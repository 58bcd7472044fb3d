"""Batch normalization with running averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from weft import functional
from weft.functional.dtypes import canonicalize_dtype
from weft.functional.initializers import ones, zeros
from weft.functional.statistics import canonical_axes, cast, statistics_dtype
from weft.linen.calls import merge_param
from weft.linen.initializers import Initializer
from weft.linen.methods import compact
from weft.linen.module import Module
from weft.linen.normalization import scale_and_bias

__all__ = ["BatchNorm"]


class BatchNorm(Module):
    """Normalization with statistics of the batch or running averages (Ioffe and Szegedy, 2015).

    `apply` updates the averages `mean` and `var` of the collection `batch_stats` if it is mutable.

    Attributes:
        use_running_average: whether to normalize with the averages, as in evaluation, without
            updating them; set here or in the call.
        axis: feature axes; each position along them has its own statistics.
        momentum: decay of the averages.
        dtype: output dtype; by default promoted from input and parameters.
        axis_name: mapped or mesh axis over which the batch is split. All parts use the statistics
            of the whole batch, weighted by their masks. `init` does not need the axis.
        axis_index_groups: groups of indices of that axis that share statistics, see `jax.lax.psum`.
        use_fast_variance: whether to compute mean and variance in one reduction.
        force_float32_reductions: whether statistics have at least float32; otherwise the averages
            have `param_dtype`.

    Example:
        >>> import jax
        >>> from weft import linen as nn
        >>> x = jnp.array([[1.0], [3.0]])
        >>> layer = nn.BatchNorm(momentum=0.5)
        >>> variables = layer.init(jax.random.key(0), x, use_running_average=False)
        >>> y, updates = layer.apply(
        ...     variables, x, use_running_average=False, mutable=["batch_stats"]
        ... )
        >>> y.round(2).tolist(), updates["batch_stats"]["mean"].tolist()
        ([[-1.0], [1.0]], [1.0])
    """

    use_running_average: bool | None = None
    axis: int | Sequence[int] = -1
    momentum: float = 0.99
    epsilon: float = 1e-5
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = zeros
    scale_init: Initializer = ones
    axis_name: str | None = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True

    @compact
    def __call__(
        self,
        x: Float[Array, "*shape"],
        use_running_average: bool | None = None,
        *,
        mask: Bool[Array, "*#shape"] | None = None,
    ) -> Float[Array, "*shape"]:
        """Normalizes a batch.

        Args:
            use_running_average: see the attribute; exactly one of the two must be set.
            mask: values that count in the statistics; all by default.

        Raises:
            ParameterGivenTwiceError: if `use_running_average` is given twice or not at all.
        """
        use_average = merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        features = canonical_axes(self.axis, x.ndim)
        shape = [size if a in features else 1 for a, size in enumerate(x.shape)]
        squeezed = tuple(size for a, size in enumerate(x.shape) if a in features)
        kept = jnp.float32 if self.force_float32_reductions else self.param_dtype
        averages = [
            self.variable("batch_stats", "mean", lambda: jnp.zeros(squeezed, kept)),
            self.variable("batch_stats", "var", lambda: jnp.ones(squeezed, kept)),
        ]
        if use_average:
            mean, var = (average.value.reshape(shape) for average in averages)
        else:
            initializing = self.is_initializing()
            mean, var = functional.moments(
                x,
                axis=[a for a in range(x.ndim) if a not in features],
                where=mask,
                axis_name=None if initializing else self.axis_name,
                axis_index_groups=self.axis_index_groups,
                fast=self.use_fast_variance,
                dtype=statistics_dtype(x, self.force_float32_reductions),
            )
            if not initializing:
                for average, value in zip(averages, (mean, var), strict=True):
                    average.value = functional.update_running_average(
                        average.value, value.reshape(squeezed), decay=self.momentum
                    )
        scale, bias = scale_and_bias(self, squeezed)
        y = functional.batch_norm(
            cast(x, statistics_dtype(x, self.force_float32_reductions)),
            mean,
            var,
            None if scale is None else scale.reshape(shape),
            None if bias is None else bias.reshape(shape),
            eps=self.epsilon,
            dtype=None,
        )
        return cast(y, canonicalize_dtype(x, scale, bias, dtype=self.dtype))
