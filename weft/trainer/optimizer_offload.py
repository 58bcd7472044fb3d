"""Offloading of an optimizer's state to host memory between steps.

`partition` sets the memory kind in the layout, and `update` moves the state to the accelerator and
back. XLA decides how much of the transfer overlaps with computation.
"""

import re
from collections.abc import Callable
from typing import Any

import jax

from weft.errors import OptimizerArgumentError
from weft.hierarchy.base_layer import NestedParameterSpec
from weft.trainer.optimizer_base import (
    NestedOptParam,
    PartitionedGradientTransformation,
    as_partitioned,
    copy_partition,
    path_name,
)
from weft.typing import NestedTensor

_SPACES = {"device": jax.memory.Space.Device, "pinned_host": jax.memory.Space.Host}


def offload_optimizer(
    optimizer: Any,
    *,
    pattern: str | re.Pattern = ".*",
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> PartitionedGradientTransformation:
    """Keeps the state of an optimizer in another memory between steps.

    Args:
      pattern: matches the whole path of the leaves to move, such as "0/mu/decoder/emb/weight".
      offload_src: memory in which the optimizer computes: "device" or "pinned_host".
      offload_dst: memory that holds the state between steps, as above.

    Raises:
      OptimizerArgumentError: if a memory is unknown.
    """
    inner = as_partitioned(optimizer)
    to_src = _move_to("offload_src", offload_src, pattern)
    to_dst = _move_to("offload_dst", offload_dst, pattern)

    def update_fn(
        updates: NestedTensor, state: Any, params: NestedOptParam
    ) -> tuple[NestedTensor, Any]:
        updates, state = inner.update(updates, to_src(state), params)
        return updates, to_dst(state)

    def partition_fn(param_specs: NestedParameterSpec) -> Any:
        specs = inner.partition(param_specs)
        return copy_partition(specs, pattern=pattern, memory_kind=offload_dst)

    return PartitionedGradientTransformation(
        lambda params: to_dst(inner.init(params)), update_fn, partition_fn
    )


def _move_to(argument: str, memory_kind: str, pattern: str | re.Pattern) -> Callable[[Any], Any]:
    if memory_kind not in _SPACES:
        raise OptimizerArgumentError(
            f"offload_optimizer knows the memories {sorted(_SPACES)}; got "
            f"{argument}={memory_kind!r}."
        )

    def move(path: tuple[Any, ...], x: Any) -> Any:
        if not re.fullmatch(pattern, path_name(path)):
            return x
        return jax.device_put(x, _SPACES[memory_kind])

    return lambda state: jax.tree_util.tree_map_with_path(move, state)
