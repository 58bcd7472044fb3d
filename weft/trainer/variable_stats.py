"""Statistics of parameters and gradients that a learner reports.

rms        root mean square norm       root of the sum of squares max_abs    maximum absolute value
histogram  up to 1,024 of the values, evenly spaced over the array
"""

from collections.abc import Callable

import jax.numpy as jnp

from weft.config.names import did_you_mean
from weft.errors import VariableStatError
from weft.typing import Tensor

_SAMPLES = 1024


def variable_stat(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the function that computes a statistic; raises a VariableStatError for unknown names.

    >>> float(variable_stat("norm")(jnp.array([3.0, -4.0])))
    5.0
    """
    if name not in _STATS:
        raise VariableStatError(
            f"per_variable_stats names {name!r}, which is not a statistic. "
            f"{did_you_mean(name, _STATS)}"
        )
    return _STATS[name]


def _rms(x: Tensor) -> Tensor:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def _norm(x: Tensor) -> Tensor:
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))


def _max_abs(x: Tensor) -> Tensor:
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def _sample(x: Tensor) -> Tensor:
    return x.reshape(-1)[:: -(-x.size // _SAMPLES)].astype(jnp.float32)


_STATS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms": _rms,
    "norm": _norm,
    "max_abs": _max_abs,
    "histogram": _sample,
}
