"""Rematerialization policies by the names of intermediate values.

Layers name their intermediate values `<layer class>.<name>`, such as "MultiheadAttention.q_proj". A
policy saves values whose names match a regular expression, offloads others to host memory, and
recomputes the rest in the backward pass.
"""

import enum
import re
from collections.abc import Callable
from typing import Any

import jax

from weft.config import config_for_function
from weft.hierarchy.base_layer import RematSpec
from weft.hierarchy.stack import BaseStackedTransformerLayer, StackedTransformerLayer


class RematRegexSavePatterns(enum.Enum):
    """Useful patterns of names to save."""

    QKV_PROJ = r".*\.[qkv]_proj"
    O_PROJ = r".*\.o_proj"
    CONTEXT = r".*\.context"
    LINEAR1_X = r".*\.linear1_[01]"
    LINEAR2_X = r".*\.linear2_[01]"
    NATIVE_ATTENTION = r".*\.([qkvo]_proj|context)"
    """Intermediate values of attention, except logits and probabilities."""
    FEED_FORWARD = r".*\.linear[12]_[01]"
    """The linear maps of feed-forward layers."""


def save_and_offload_these_names_regex(
    names_which_can_be_saved: str | None = None,
    names_which_can_be_offloaded: str | None = None,
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> Callable[..., Any]:
    """Returns a policy for `jax.checkpoint` that goes by the names of values.

    Args:
      names_which_can_be_saved: a regular expression that must match the whole name; None for none.
      names_which_can_be_offloaded: the same for values to offload if they are not saved.
      offload_src: memory from which values are offloaded.
      offload_dst: memory to which values are offloaded.
    """

    def policy(prim: Any, *args: Any, **params: Any) -> Any:
        name = params.get("name") if prim.name == "name" else None
        if name is None:
            return False
        if names_which_can_be_saved and re.fullmatch(names_which_can_be_saved, name):
            return True
        offload = names_which_can_be_offloaded or ""
        if not re.fullmatch(offload, name):
            return False
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[name],
            offload_src=offload_src,
            offload_dst=offload_dst,
        )(prim, *args, **params)

    return policy


def build_remat_spec(
    stack_cfg: BaseStackedTransformerLayer.Config,
    *,
    save_pattern: str | None = RematRegexSavePatterns.NATIVE_ATTENTION.value,
    offload_pattern: str | None = None,
    offload_dst: str = "pinned_host",
) -> RematSpec:
    """Returns the `remat_spec` for the config of a stack's layer.

    Args:
      stack_cfg: config of the stack.
      save_pattern: a regular expression for names of values to save; None for none.
      offload_pattern: the same for values to offload.
      offload_dst: memory to which values are offloaded.
    """
    return RematSpec(
        # In a loop, the compiler cannot merge recomputed values with the original ones.
        prevent_cse=issubclass(stack_cfg.klass, StackedTransformerLayer),
        policy=config_for_function(save_and_offload_these_names_regex).set(
            names_which_can_be_saved=save_pattern,
            names_which_can_be_offloaded=offload_pattern,
            offload_dst=offload_dst,
        ),
    )
