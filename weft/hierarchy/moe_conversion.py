"""Conversion of dense transformer parameters to those of a mixture of experts."""

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
    """Copies dense layers into every expert (sparse upcycling: Komatsuzaki et al., 2023).

    Args:
      source_parameters: of a model with bias-free `TransformerFeedForwardLayer`s.
      target_parameter_specs: of the same model with some of them `TransformerFeedForwardMoE`s.

    Returns:
      Parameters for `initialize_parameters_recursively(..., prebuilt=...)` of the target. Those
      that the source lacks, such as router weights, remain specs and will be initialized.

    Raises:
      ParameterSpecError: if a parameter has no counterpart or another shape, naming it.
    """
    return _converted(source_parameters, target_parameter_specs, "")


# Parameters of an expert layer, and the dense layers that they come from.
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
    # Keeps a VDict, which marks a stack.
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
            f"{path or 'the source'} has the parameters {sorted(left)}, which the target "
            f"lacks; it has {sorted(target)}."
        )
    return new


def _take(source: Mapping[str, Any], name: str, at: str) -> Any:
    if name not in source:
        raise ParameterSpecError(
            f"{at} is copied from {name!r} of the source, which has {sorted(source)}. "
            f"{did_you_mean(name, source)}"
        )
    return source[name]


def _copies(linear: Mapping[str, Tensor], spec: Any, at: str) -> Tensor:
    """Repeats a linear layer's weight for each expert."""
    if left := sorted(set(linear) - {"weight"}):
        raise ParameterSpecError(
            f"{at} is copied from a linear layer with {left}, but experts have only weights; "
            "expected a dense layer with bias=False."
        )
    # Experts are the third axis from the end; axes of a stack may precede it.
    one = linear["weight"][..., None, :, :]
    num_experts = spec.shape[-3]
    return _same_shape(jnp.repeat(one, num_experts, axis=-3), spec, at)


def _same_shape(value: Tensor, spec: Any, at: str) -> Tensor:
    if tuple(value.shape) != tuple(spec.shape):
        raise ParameterSpecError(
            f"{at} has shape {tuple(spec.shape)} in the target, but the source has "
            f"{tuple(value.shape)}."
        )
    return value
