"""Parameters of several equal layers, as one tree whose arrays have a leading axis.

A layer that runs one child several times, each time with parameters of its own, holds them
stacked: the specs gain a leading axis, which no mesh axis is laid over and which counts as a batch
axis of the fans, and each copy is drawn with a key of its own. The subtree is a `VDict`, so that an
optimizer can tell layers apart.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp

from weft.errors import ParameterSpecError
from weft.hierarchy.context_kind import fork_key
from weft.hierarchy.parameter_spec import ParameterSpec, with_leading_axis
from weft.typing import NestedTensor, Tensor
from weft.vdict import VDict

if TYPE_CHECKING:
    from weft.hierarchy.base_layer import BaseLayer


def parameter_specs_of_copies(layer: "BaseLayer", n: int | None) -> dict[str, Any]:
    """The parameter specs of copies of a layer.

    Args:
      layer: one of them.
      n: the number of copies; None for the layer alone, without a leading axis.
    """
    specs = layer.create_parameter_specs_recursively()
    if n is None:
        return specs
    return VDict(jax.tree.map(lambda spec: with_leading_axis(spec, n), specs))


def initialize_copies(
    layer: "BaseLayer", n: int | None, prng_key: Tensor, *, prebuilt: NestedTensor | None = None
) -> dict[str, Any]:
    """Draws the parameters of copies of a layer.

    Args:
      layer: one of them.
      n: the number of copies; None for the layer alone, without a leading axis.
      prng_key: split for each copy, so that the first copies do not depend on `n`.
      prebuilt: values to use instead, stacked; what is missing or None is drawn.

    Raises:
      ParameterSpecError: if a value in `prebuilt` has another leading axis, or a wrong shape.
    """
    if n is None:
        return layer.initialize_parameters_recursively(prng_key, prebuilt=prebuilt)
    given = jax.tree.map(
        lambda x: None if isinstance(x, ParameterSpec) else x, dict(prebuilt or {})
    )
    for path, value in jax.tree_util.tree_leaves_with_path(given):
        if jnp.shape(value)[:1] != (n,):
            raise ParameterSpecError(
                f"prebuilt {layer.path()}{jax.tree_util.keystr(path)} has the shape "
                f"{jnp.shape(value)}; expected a leading axis of {n}, one entry for each copy of "
                f"{layer.path()}."
            )

    def initialize(key: Tensor, values: NestedTensor) -> NestedTensor:
        return layer.initialize_parameters_recursively(key, prebuilt=values)

    keys = fork_key(prng_key, n)
    if isinstance(prng_key, jax.core.Tracer):
        # A loop compiles for one copy, in 0.4 x the time that vmap takes for all of them at once.
        return VDict(jax.lax.map(lambda of_copy: initialize(*of_copy), (keys, given)))
    # Outside of a compiled function, a loop would be compiled anew at each call.
    drawn = [initialize(keys[i], jax.tree.map(lambda x, i=i: x[i], given)) for i in range(n)]
    return VDict(jax.tree.map(lambda *copies: jnp.stack(copies), *drawn))
