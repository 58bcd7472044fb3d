"""Stacked parameters of equal layers.

A layer that runs one child several times with separate parameters holds them stacked. Their specs
have a leading axis, which is replicated and counts as a batch axis of the fans, and each copy is
initialized with its own key. The subtree is a `VDict`, so that optimizers can separate the layers.
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
    """Returns the specs of `n` copies of a layer, or for n=None of the layer itself."""
    specs = layer.create_parameter_specs_recursively()
    if n is None:
        return specs
    return VDict(jax.tree.map(lambda spec: with_leading_axis(spec, n), specs))


def initialize_copies(
    layer: "BaseLayer", n: int | None, prng_key: Tensor, *, prebuilt: NestedTensor | None = None
) -> dict[str, Any]:
    """Initializes the parameters of `n` copies of a layer, or for n=None of the layer itself.

    Args:
      layer: one of the copies.
      n: number of copies.
      prng_key: split for each copy, so that the first copies do not depend on `n`.
      prebuilt: stacked values to use instead; missing values and None are initialized.

    Raises:
      ParameterSpecError: if a value in `prebuilt` has a wrong leading axis or shape.
    """
    if n is None:
        return layer.initialize_parameters_recursively(prng_key, prebuilt=prebuilt)
    given = jax.tree.map(
        lambda x: None if isinstance(x, ParameterSpec) else x, dict(prebuilt or {})
    )
    for path, value in jax.tree_util.tree_leaves_with_path(given):
        if jnp.shape(value)[:1] != (n,):
            raise ParameterSpecError(
                f"prebuilt {layer.path()}{jax.tree_util.keystr(path)} has shape "
                f"{jnp.shape(value)}; expected a leading axis of {n}, one entry per copy of "
                f"{layer.path()}."
            )

    def initialize(key: Tensor, values: NestedTensor) -> NestedTensor:
        return layer.initialize_parameters_recursively(key, prebuilt=values)

    keys = fork_key(prng_key, n)
    if isinstance(prng_key, jax.core.Tracer):
        # A loop compiles for one copy, in 0.4 x the compile time of vmap.
        return VDict(jax.lax.map(lambda of_copy: initialize(*of_copy), (keys, given)))
    # Outside of a compiled function, a loop would be recompiled at each call.
    drawn = [initialize(keys[i], jax.tree.map(lambda x, i=i: x[i], given)) for i in range(n)]
    return VDict(jax.tree.map(lambda *copies: jnp.stack(copies), *drawn))
