"""Layers whose weight may be stored in 8 or 4 bits, and states with such weights.

A layer with `weight_format` has the parameters `weight_codes` and `weight_scales` in place of
`weight`. They are state: no optimizer updates them, and nothing casts them. The weight exists only
while its product is computed, in the backward pass again, so that a model takes the memory of the
codes, see `weft.functional.quantize_weight`.

    set_weight_format_recursively(cfg, "nf4")
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from weft import functional
from weft.functional.linear import add_bias
from weft.hierarchy.base_layer import (
    BaseLayer,
    Parameters,
    ParameterSpec,
)
from weft.hierarchy.parameter_spec import PartitionSpec
from weft.serialization.array_parts import ArrayFromParts
from weft.typing import DType, PyTree, Tensor

R = TypeVar("R")

CODES, SCALES = "weight_codes", "weight_scales"


class StoredWeightLayer(BaseLayer):
    """Base of layers with one weight, which may be stored in few bits."""

    class Config(BaseLayer.Config):
        """Configures a StoredWeightLayer."""

        weight_format: functional.WeightFormat | None = None
        """How the weight is stored if it is not trained: "int8" or "nf4"; None for the layer's
        dtype. A weight whose last axis is not a multiple of 8 keeps the layer's dtype."""

    def _own_parameter_specs(self) -> dict[str, ParameterSpec]:
        specs = super()._own_parameter_specs()
        weight_format = self.config.weight_format
        weight = specs.get("weight")
        if weight_format is None or weight is None:
            return specs
        if not functional.can_quantize(tuple(weight.shape)):
            return specs
        codes, scales = jax.eval_shape(
            lambda: functional.quantize_weight(
                jnp.zeros(weight.shape), weight_format
            )
        )
        # The blocks of a row are not divided.
        scales_axes = PartitionSpec(*tuple(weight.partition_spec)[:-1], None)
        del specs["weight"]
        specs[CODES] = _state_like(
            weight, codes, mesh_axes=weight.partition_spec
        )
        specs[SCALES] = _state_like(weight, scales, mesh_axes=scales_axes)
        return specs

    def _initialize_parameter(
        self,
        name: str,
        spec: ParameterSpec,
        prng_key: Tensor,
        prebuilt: PyTree,
    ) -> Tensor | None:
        weight_format = self.config.weight_format
        if (
            name not in (CODES, SCALES)
            or prebuilt is not None
            or weight_format is None
        ):
            return super()._initialize_parameter(name, spec, prng_key, prebuilt)
        weight_spec = super()._own_parameter_specs()["weight"]
        weight: Any = super()._initialize_parameter(
            "weight", weight_spec, prng_key, None
        )
        quantized = functional.quantize_weight(weight, weight_format)
        return quantized.codes if name == CODES else quantized.scales

    def _with_weight(
        self,
        product: Callable[[Tensor, Tensor], R],
        x: Tensor,
        parameters: Parameters,
    ) -> R:
        """Returns the product of an input and the weight of the layer's parameters."""
        if CODES not in parameters:
            weight: Any = parameters["weight"]
            if isinstance(weight, functional.Int8Weight):
                return self._int8_product(x, weight, parameters)
            return product(x, weight)
        dtype = self.compute_dtype() or x.dtype

        # Without it, the backward pass would keep the whole weight of every layer.
        @jax.checkpoint
        def dequantized_product(x: Tensor, codes: Tensor, scales: Tensor) -> R:
            quantized = functional.QuantizedWeight(codes, scales)
            return product(x, functional.dequantize_weight(quantized, dtype))

        return dequantized_product(x, parameters[CODES], parameters[SCALES])

    def _int8_product(
        self, x: Tensor, weight: functional.Int8Weight, parameters: Parameters
    ) -> Any:
        y = functional.int8_product(x, weight)
        bias = parameters.get("bias")
        return y if bias is None else add_bias(y, bias)


def _state_like(
    weight: ParameterSpec, x: jax.ShapeDtypeStruct, *, mesh_axes: PartitionSpec
) -> ParameterSpec:
    return dataclasses.replace(
        weight,
        shape=x.shape,
        dtype=x.dtype,
        mesh_axes=mesh_axes,
        logical_axes=None,
        # See `_initialize_parameter`.
        initializer=None,
        factorization=None,
        fan_axes=None,
        is_state=True,
    )


def dequantized_state(state: PyTree) -> PyTree:
    """Returns a copy of a state with weights in place of their codes."""
    if not isinstance(state, dict):
        return state
    new_state = copy.copy(state)  # a stack stays marked as one
    if CODES in state:
        quantized = functional.QuantizedWeight(
            new_state.pop(CODES), new_state.pop(SCALES)
        )
        new_state["weight"] = functional.dequantize_weight(quantized)
    for name, child in state.items():
        if isinstance(child, dict):
            new_state[name] = dequantized_state(child)
    return new_state


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """A weight in few bits as one leaf of a state: arrays, or their shapes.

    >>> weight = StoredWeight(jnp.zeros((2, 8), jnp.uint8), jnp.zeros((2, 1)))
    >>> weight.shape, weight.weight_format
    ((2, 16), 'nf4')
    """

    codes: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight that the codes stand for."""
        return functional.dequantized_shape(
            functional.QuantizedWeight(self.codes, self.scales)
        )

    @property
    def dtype(self) -> DType:
        """The dtype of the weight before it is rounded to codes."""
        return jnp.bfloat16

    @property
    def weight_format(self) -> functional.WeightFormat:
        """The format of the codes."""
        return "int8" if self.codes.dtype == jnp.int8 else "nf4"


def with_stored_weights(state: PyTree) -> PyTree:
    """Returns a copy of a state with a `StoredWeight` in place of codes and scales.

    >>> state = {"weight_codes": jnp.zeros((2, 8), jnp.uint8), "weight_scales": jnp.zeros((2, 1))}
    >>> with_stored_weights(state)["weight"].shape
    (2, 16)
    """
    if not isinstance(state, dict):
        return state
    new_state = copy.copy(state)  # a stack stays marked as one
    if CODES in state:
        weight = StoredWeight(new_state.pop(CODES), new_state.pop(SCALES))
        new_state["weight"] = weight
    for name, child in state.items():
        if isinstance(child, dict):
            new_state[name] = with_stored_weights(child)
    return new_state


def without_stored_weights(state: PyTree) -> PyTree:
    """Returns a copy of a state with the codes and scales of each `StoredWeight`.

    >>> without_stored_weights({"layer": {"weight": StoredWeight(1, 2)}})
    {'layer': {'weight_codes': 1, 'weight_scales': 2}}
    """
    if not isinstance(state, dict):
        return state
    new_state = copy.copy(state)  # a stack stays marked as one
    for name, child in state.items():
        if isinstance(child, StoredWeight):
            del new_state[name]
            new_state[CODES] = child.codes
            new_state[SCALES] = child.scales
        else:
            new_state[name] = without_stored_weights(child)
    return new_state


class ParameterFromParts:
    """A parameter that is filled part by part, and rounded to codes if it is a `StoredWeight`.

    Args:
        target: Its shape, dtype and sharding; or a `StoredWeight` of shapes. Parts are given below
            an index of leading axes, as for `ArrayFromParts`.
    """

    def __init__(self, target: Any):
        self._weight_format: functional.WeightFormat | None = None
        arrays: list[Any] = [target]
        if isinstance(target, StoredWeight):
            self._weight_format = target.weight_format
            arrays = [target.codes, target.scales]
        self._shape = tuple(target.shape)
        self._arrays = [
            ArrayFromParts(x.shape, x.dtype, getattr(x, "sharding", None))
            for x in arrays
        ]

    def box(self, index: Sequence[int]) -> tuple[slice, ...] | None:
        """Returns along each axis of a part what is needed of it; None for nothing."""
        if self._weight_format is None:
            return self._arrays[0].box(index)
        if all(array.box(index) is None for array in self._arrays):
            return None
        # The blocks of a row have one scale.
        return tuple(slice(0, size) for size in self._shape[len(index) :])

    def write(self, index: Sequence[int], values: np.ndarray) -> None:
        """Sets the values of a part, or what `box` says of it."""
        if self._weight_format is None:
            self._arrays[0].write(index, values)
            return
        quantized = _quantized(values.astype(jnp.bfloat16), self._weight_format)
        for array, x in zip(self._arrays, quantized, strict=True):
            box = array.box(index)
            if box is not None:
                array.write(index, np.asarray(x)[box])

    def on_devices(self) -> Any:
        """Returns the array, or the `StoredWeight` of arrays."""
        if self._weight_format is None:
            return self._arrays[0].on_devices()
        return StoredWeight(*(array.on_devices() for array in self._arrays))


_quantized = jax.jit(functional.quantize_weight, static_argnums=1)
