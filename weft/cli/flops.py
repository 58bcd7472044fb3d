"""The floating-point operations of a function, counted in its jaxpr.

Only products of matrices and convolutions count: in a neural network all else is small beside them.
A scan's body counts once for each iteration, which XLA's own analysis does not do.
"""

import math
from collections.abc import Callable
from typing import Any

import jax


def count_flops(fn: Callable[..., Any], *args: Any) -> int:
    """Counts without running.

    Args:
        fn: A function of arrays.
        *args: Arrays, or their shapes as `jax.ShapeDtypeStruct`.

    Returns:
        Multiplications and additions. The body of a `while_loop` counts once; of the branches of a
        `cond` the costliest counts.

    >>> import jax.numpy as jnp
    >>> count_flops(jnp.dot, jnp.zeros((2, 3)), jnp.zeros((3, 5)))
    60
    """
    return _count(jax.make_jaxpr(fn)(*args).jaxpr)


def _count(jaxpr: Any) -> int:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        lhs = equation.invars[0].aval.shape
        return 2 * _size(equation) * math.prod(lhs[axis] for axis in contracted)
    if name == "conv_general_dilated":
        # Each output sums over a window of input features: all of the kernel but its outputs.
        kernel = equation.invars[1].aval.shape
        outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2 * _size(equation) * math.prod(kernel) // outputs
    inner = [_count(jaxpr) for value in params.values() for jaxpr in _jaxprs(value)]
    if name == "cond":
        return max(inner, default=0)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _size(equation: Any) -> int:
    return math.prod(equation.outvars[0].aval.shape)


def _jaxprs(value: Any) -> list[Any]:
    """The jaxprs among an equation's parameters, open or closed, alone or in a sequence."""
    if isinstance(value, tuple | list):
        return [jaxpr for item in value for jaxpr in _jaxprs(item)]
    value = getattr(value, "jaxpr", value)
    return [value] if hasattr(value, "eqns") else []
