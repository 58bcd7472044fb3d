"""Floating-point operations of a function, counted in its jaxpr.

Only matrix products and convolutions count, a scan's body once per iteration, that of a shard_map
once per device, each product for the weight that it uses, followed through casts, reshapes and
slices.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import jax

from weft.core.spmd import as_on_one_device, axes_of
from weft.hierarchy.module import Module, functional
from weft.trainer.optimizers.base import tree_paths
from weft.typing import NestedTensor, PyTree, Tensor

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

# Dense bfloat16 FLOP/s per device, by JAX's device kind, from the makers' data sheets. The longest
# name contained in a device kind applies.
PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "V100": 125e12,
    "A10G": 70e12,
    "A100": 312e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}

FLOPS_OF_STEPS: WeakKeyDictionary[jax.stages.Compiled, float] = (
    WeakKeyDictionary()
)
"""Operations per device of compiled steps: XLA's own analysis counts the body of a loop, such as
that over the layers of a model, once."""


def peak_flops_of(device_kind: str) -> float | None:
    """Returns the peak operations per second of a `jax.Device.device_kind`; None for unknown ones.

    >>> peak_flops_of("NVIDIA H100 80GB HBM3"), peak_flops_of("cpu")
    (989000000000000.0, None)
    """
    names = [name for name in PEAK_FLOPS if name in device_kind]
    if not names:
        return None
    return PEAK_FLOPS[max(names, key=len)]


def forward_flops(
    model: Module, params: NestedTensor, batch: NestedTensor
) -> int:
    """Counts the operations of a forward pass over a global batch, without running it.

    Those whose results are discarded, of idle stages of a pipeline and of rows of padding that
    devices exchange for experts, do not count.

    Parameters and batch are arrays or their shapes.
    """

    def forward(params: NestedTensor, batch: NestedTensor) -> Tensor:
        key = jax.random.key(0)
        with as_on_one_device():
            (loss, _), _ = functional(
                model, key, params, {"input_batch": batch}, is_training=True
            )
        return loss

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch)
    )
    return count_flops(forward, *shapes).total()


def jaxpr_flops(jaxpr: Any) -> int:
    """Counts the operations of a traced program, such as `jax.jit(f).trace(x).jaxpr`."""
    flops, _ = _count_jaxpr(jaxpr.jaxpr, [None] * len(jaxpr.jaxpr.invars))
    return flops.total()


# Operations by the path of a weight.
Flops = Counter[str | None]
# The weight that each of some values is, if any.
_Sources = Sequence[str | None]


def count_flops(
    fn: Callable[..., PyTree], weights: PyTree, *args: PyTree
) -> Flops:
    """Counts the floating-point operations of a function without running it.

    `weights`, its first argument, is a pytree of arrays, or their shapes as `jax.ShapeDtypeStruct`.
    Returns operations by the path of the weight, joined by `/`; under None those of products
    without a weight. The body of a `while_loop` counts once; of a `cond` the costliest branch.

    >>> count_flops(lambda w, x: x @ w["a"], {"a": jnp.zeros((3, 5))}, jnp.zeros((2, 3)))
    Counter({'a': 60})
    """
    paths = jax.tree.leaves(tree_paths(weights))
    jaxpr = jax.make_jaxpr(fn)(weights, *args).jaxpr
    num_other_inputs = len(jaxpr.invars) - len(paths)
    flops, _ = _count_jaxpr(jaxpr, [*paths, *[None] * num_other_inputs])
    return flops


def _count_jaxpr(
    jaxpr: "Jaxpr", input_sources: _Sources
) -> tuple[Flops, _Sources]:
    """Returns the operations of a jaxpr, and the weight that each of its outputs is, if any."""
    sources: "dict[Var | Literal, str | None]" = {}
    sources.update(zip(jaxpr.invars, input_sources, strict=True))

    def look_up(values: "Iterable[Var | Literal]") -> _Sources:
        # A literal has no hash.
        return [
            None if hasattr(value, "val") else sources.get(value)
            for value in values
        ]

    flops: Flops = Counter()
    for equation in jaxpr.eqns:
        equation_flops, output_sources = _count_equation(
            equation, look_up(equation.invars)
        )
        flops.update(equation_flops)
        sources.update(zip(equation.outvars, output_sources, strict=True))
    return flops, look_up(jaxpr.outvars)


def _count_equation(
    equation: "JaxprEqn", sources: _Sources
) -> tuple[Flops, _Sources]:
    """Returns the operations of an equation, and the weight that each output is, if any."""
    from jax.extend.core import jaxprs_in_params

    name = equation.primitive.name
    no_sources: _Sources = [None] * len(equation.outvars)
    if name in ("dot_general", "conv_general_dilated"):
        weights = [source for source in sources if source is not None]
        weight = weights[0] if weights else None
        return Counter({weight: _flops_of_product(equation)}), no_sources
    bodies = list(jaxprs_in_params(equation.params))
    if not bodies:
        array_sources: list[str | None] = []
        for operand, source in zip(equation.invars, sources, strict=True):
            if _shape(operand):
                array_sources.append(source)
        if len(array_sources) == 1:
            # A weight that is cast, transposed or sliced stays a weight.
            return Counter(), array_sources * len(equation.outvars)
        return Counter(), no_sources
    results = [
        _count_jaxpr(body, _sources_of_body(name, body, sources))
        for body in bodies
    ]
    flops_of_bodies = [flops for flops, _ in results]
    if name == "cond":
        return max(flops_of_bodies, key=Counter.total), no_sources
    repetitions = 1
    if name == "scan":
        repetitions = equation.params["length"]
    if name == "shard_map":
        repetitions = _num_parts(equation.params)
    total: Flops = Counter()
    for flops in flops_of_bodies:
        for source, count in flops.items():
            total[source] += repetitions * count
    _, output_sources = results[0]
    if len(bodies) == 1 and len(output_sources) == len(equation.outvars):
        return total, output_sources
    return total, no_sources


def _num_parts(params: Mapping[str, Any]) -> int:
    """Returns how many devices compute different parts in a `shard_map`, by its parameters."""
    axes: set[str] = set()
    for spec in params["in_specs"]:
        for entry in spec:
            axes.update(axes_of(entry))
    return math.prod(params["mesh"].shape[name] for name in axes)


def _sources_of_body(name: str, body: "Jaxpr", sources: _Sources) -> _Sources:
    """Returns the sources of a body's arguments, the last of the equation's."""
    num_inputs = len(body.invars)
    if name == "while" or num_inputs > len(sources):
        return [None] * num_inputs
    return sources[len(sources) - num_inputs :]


def _flops_of_product(equation: "JaxprEqn") -> int:
    """Returns the operations of a matrix product or convolution: two for each addend."""
    lhs, rhs = map(_shape, equation.invars)
    dimension_numbers = equation.params["dimension_numbers"]
    if equation.primitive.name == "dot_general":
        (contracted_axes, _), _ = dimension_numbers
        num_addends = math.prod(lhs[axis] for axis in contracted_axes)
    else:
        # Each output sums over a window of input features: all of the kernel but its outputs.
        num_addends = math.prod(rhs) // rhs[dimension_numbers.rhs_spec[0]]
    num_outputs = math.prod(_shape(equation.outvars[0]))
    return 2 * num_outputs * num_addends


def _shape(value: "Var | Literal") -> tuple[int, ...]:
    return getattr(value.aval, "shape", ())  # a token has none
