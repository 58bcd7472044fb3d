"""Floating-point operations of a function, counted in its jaxpr.

Only matrix products and convolutions count; in a neural network the rest is negligible. A scan's
body counts once per iteration, which XLA's own analysis does not do. Each product is attributed to
the weight that it uses, which is followed through casts, reshapes and slices.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

Flops = Counter[str | None]


def count_flops(fn: Callable[..., Any], weights: Any, *args: Any) -> Flops:
    """Counts the floating-point operations of a function without running it.

    Args:
        fn: A function of arrays.
        weights: Its first argument: a pytree of arrays, or their shapes as `jax.ShapeDtypeStruct`.
        *args: The others.

    Returns:
        Operations by the path of the weight, joined by `/`; under None those of products without a
        weight. The body of a `while_loop` counts once; of a `cond` the costliest branch.

    >>> import jax.numpy as jnp
    >>> count_flops(lambda w, x: x @ w["a"], {"a": jnp.zeros((3, 5))}, jnp.zeros((2, 3)))
    Counter({'a': 60})
    """
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(weights)
    ]
    jaxpr = jax.make_jaxpr(fn)(weights, *args).jaxpr
    others = [None] * (len(jaxpr.invars) - len(paths))
    return _count(jaxpr, [*paths, *others])[0]


def _count(jaxpr: Any, sources: list[str | None]) -> tuple[Flops, list[str | None]]:
    """Returns the operations of a jaxpr, and the weight that each of its outputs is, if any."""
    source_of = dict(zip(jaxpr.invars, sources, strict=True))

    def look_up(variables: Any) -> list[str | None]:
        return [None if hasattr(v, "val") else source_of.get(v) for v in variables]

    total: Flops = Counter()
    for equation in jaxpr.eqns:
        flops, outputs = _count_equation(equation, look_up(equation.invars))
        total.update(flops)
        source_of.update(zip(equation.outvars, outputs, strict=True))
    return total, look_up(jaxpr.outvars)


def _count_equation(equation: Any, sources: list[str | None]) -> tuple[Flops, list[str | None]]:
    name, params = equation.primitive.name, equation.params
    computed: list[str | None] = [None] * len(equation.outvars)
    if name in _PRODUCTS:
        source = next((s for s in sources if s is not None), None)
        return Counter({source: _PRODUCTS[name](equation)}), computed
    inner = [jaxpr for value in params.values() for jaxpr in _jaxprs(value)]
    if not inner:
        # With a single array operand, such as a cast, transpose or slice, a weight stays a weight.
        arrays = [s for v, s in zip(equation.invars, sources, strict=True) if not _is_scalar(v)]
        return Counter(), arrays * len(computed) if len(arrays) == 1 else computed
    counted = [_count(jaxpr, _of_body(name, jaxpr, sources)) for jaxpr in inner]
    if name == "cond":
        return max((flops for flops, _ in counted), key=Counter.total), computed
    times = params["length"] if name == "scan" else 1
    total: Flops = Counter()
    for flops, _ in counted:
        total.update({source: times * count for source, count in flops.items()})
    outputs = counted[0][1]
    return total, outputs if len(counted) == 1 and len(outputs) == len(computed) else computed


def _of_body(name: str, jaxpr: Any, sources: list[str | None]) -> list[str | None]:
    """Returns the sources of a body's arguments, the last of the equation's."""
    count = len(jaxpr.invars)
    known = [] if name == "while" or count > len(sources) else sources[len(sources) - count :]
    return known or [None] * count


def _flops_of_dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    lhs = equation.invars[0].aval.shape
    return 2 * _size(equation) * math.prod(lhs[axis] for axis in contracted)


def _flops_of_conv(equation: Any) -> int:
    # Each output sums over a window of input features: all of the kernel but its outputs.
    kernel = equation.invars[1].aval.shape
    outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * _size(equation) * math.prod(kernel) // outputs


_PRODUCTS: dict[str, Callable[[Any], int]] = {
    "dot_general": _flops_of_dot,
    "conv_general_dilated": _flops_of_conv,
}


def _size(equation: Any) -> int:
    return math.prod(equation.outvars[0].aval.shape)


def _is_scalar(variable: Any) -> bool:
    return not variable.aval.shape


def _jaxprs(value: Any) -> list[Any]:
    """Returns the jaxprs in a parameter of an equation, open or closed, alone or in a sequence."""
    if isinstance(value, tuple | list):
        return [jaxpr for item in value for jaxpr in _jaxprs(item)]
    value = getattr(value, "jaxpr", value)
    return [value] if hasattr(value, "eqns") else []
