"""Arrays of known types without values, in traces that are not compiled.

They depend on the inputs that the loop would read, also under `vmap` and in derivatives, such that
results computed from them contain the primitive. It cannot be evaluated or compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.dtypes import float0
from jax.extend.core import Primitive, subjaxprs, unmapped_aval
from jax.interpreters import ad, batching

_undefined = Primitive("undefined")
_undefined.multiple_results = True


def undefined(types: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Returns arrays of abstract values `types` that depend on all `inputs`."""
    return _undefined.bind(*inputs, types=tuple(types)) if types else []


def has_undefined(jaxpr: Any) -> bool:
    """Returns whether an equation of a jaxpr, or of one inside, computes undefined arrays."""
    return any(eqn.primitive is _undefined for eqn in jaxpr.eqns) or any(
        map(has_undefined, subjaxprs(jaxpr))
    )


@_undefined.def_abstract_eval
def _types(*_: Any, types: tuple[Any, ...]) -> tuple[Any, ...]:
    return types


def _batched(
    inputs: Sequence[Any], axes: Sequence[int | None], *, types: tuple[Any, ...]
) -> tuple[list[Any], list[int]]:
    sizes = [x.shape[axis] for x, axis in zip(inputs, axes, strict=True) if axis is not None]
    batched = [unmapped_aval(sizes[0], 0, aval) for aval in types]
    return undefined(batched, inputs), [0] * len(types)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, types: tuple[Any, ...]
) -> tuple[list[Any], list[Any]]:
    of_tangents = [aval.to_tangent_aval() for aval in types]
    known = [t for t in tangents if not isinstance(t, ad.Zero)]
    floats = [aval for aval in of_tangents if aval.dtype != float0]
    rest = iter(undefined(floats, known))
    zeros_or_undefined = [
        ad.Zero(aval) if aval.dtype == float0 else next(rest) for aval in of_tangents
    ]
    return undefined(types, primals), zeros_or_undefined


def _transposed(cotangents: Sequence[Any], *inputs: Any, types: tuple[Any, ...]) -> list[Any]:
    known = [ct for ct in cotangents if not isinstance(ct, ad.Zero)]
    return undefined([x.aval for x in inputs], known)


batching.primitive_batchers[_undefined] = _batched
ad.primitive_jvps[_undefined] = _jvp
ad.primitive_transposes[_undefined] = _transposed
