"""From the parameters of a dense transformer to those of a mixture of experts."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from weft.config.names import did_you_mean
from weft.errors import ParameterSpecError
from weft.typing import Tensor


def convert_dense_to_moe_parameters(
    source_parameters: Mapping[str, Any], *, target_parameter_specs: Mapping[str, Any]
) -> dict[str, Any]:
    """Makes every expert a copy of a dense layer (sparse upcycling: Komatsuzaki et al., 2023).

    Args:
      source_parameters: of a model with `TransformerFeedForwardLayer`s without biases.
      target_parameter_specs: of the same model with `TransformerFeedForwardMoE`s in the place of
        some of them.

    Returns:
      Parameters for `initialize_parameters_recursively(..., prebuilt=...)` of the target: what the
      source does not have, such as the weights of routers, is left as its spec, and will be drawn.

    Raises:
      ParameterSpecError: if a parameter has no counterpart, or another shape, naming it.
    """
    return _converted(source_parameters, target_parameter_specs, "")


# What an expert layer has, and what it is in a dense one.
_DENSE_NAMES = {
    "wi_weight": "linear1",
    "wi_0_weight": "linear1_0",
    "wi_1_weight": "linear1_1",
    "wo_weight": "linear2",
}
_DRAWN = ("gate_weight", "gating")


def _converted(source: Any, target: Mapping[str, Any], path: str) -> Any:
    is_moe = "wo_weight" in target
    used = set()
    # A stack stays marked as one.
    new: dict[str, Any] = type(target)() if isinstance(target, dict) else {}
    for name, spec in target.items():
        at = f"{path}/{name}" if path else name
        if is_moe and name in _DENSE_NAMES:
            dense = _DENSE_NAMES[name]
            used.add(dense)
            new[name] = _copies(_take(source, dense, at), spec, at)
        elif is_moe and name in _DRAWN:
            new[name] = spec
        else:
            used.add(name)
            if isinstance(spec, Mapping):
                new[name] = _converted(source.get(name, {}), spec, at)
            else:
                new[name] = _same_shape(_take(source, name, at), spec, at)
    left = [name for name in source if name not in used and jax.tree.leaves(source[name])]
    if left:
        raise ParameterSpecError(
            f"{path or 'the source'} has the parameters {sorted(left)}, which have no place in the "
            f"target, which has {sorted(target)}."
        )
    return new


def _take(source: Mapping[str, Any], name: str, at: str) -> Any:
    if name not in source:
        raise ParameterSpecError(
            f"{at} is made from {name!r} of the source, which has {sorted(source)}. "
            f"{did_you_mean(name, source)}"
        )
    return source[name]


def _copies(linear: Mapping[str, Tensor], spec: Any, at: str) -> Tensor:
    """The weight of a linear layer for each expert."""
    if left := sorted(set(linear) - {"weight"}):
        raise ParameterSpecError(
            f"{at} is made from a linear layer with {left}, and experts have weights alone; "
            "expected a dense layer with bias=False."
        )
    # Experts are the third axis from the end; before it may stand layers of a stack.
    one = linear["weight"][..., None, :, :]
    num_experts = spec.shape[-3]
    return _same_shape(jnp.repeat(one, num_experts, axis=-3), spec, at)


def _same_shape(value: Tensor, spec: Any, at: str) -> Tensor:
    if tuple(value.shape) != tuple(spec.shape):
        raise ParameterSpecError(
            f"{at} of the target has the shape {tuple(spec.shape)}, and the source gives "
            f"{tuple(value.shape)}."
        )
    return value
