"""What layers keep for the backward pass, by the names under which they compute it.

Layers name their intermediate values `<layer class>.<name>`, such as "MultiheadAttention.q_proj".
A policy keeps the values whose names match a regular expression, moves others to the host's memory,
and has the rest computed again.
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
    """Patterns of names that are worth keeping."""

    QKV_PROJ = r".*\.[qkv]_proj"
    O_PROJ = r".*\.o_proj"
    CONTEXT = r".*\.context"
    LINEAR1_X = r".*\.linear1_[01]"
    LINEAR2_X = r".*\.linear2_[01]"
    NATIVE_ATTENTION = r".*\.([qkvo]_proj|context)"
    """What attention computes, without logits and probabilities."""
    FEED_FORWARD = r".*\.linear[12]_[01]"
    """The linear maps of feed-forward layers."""


def save_and_offload_these_names_regex(
    names_which_can_be_saved: str | None = None,
    names_which_can_be_offloaded: str | None = None,
    offload_src: str = "device",
    offload_dst: str = "pinned_host",
) -> Callable[..., Any]:
    """A policy for `jax.checkpoint` by the names of values.

    Args:
      names_which_can_be_saved: a regular expression that the whole name must match; None for none.
      names_which_can_be_offloaded: likewise, for those that are not saved.
      offload_src: the memory that offloaded values come from.
      offload_dst: the memory that they go to.
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
    """How the layers of a stack are computed again in the backward pass.

    Args:
      stack_cfg: the config of the stack.
      save_pattern: a regular expression for the names of values to keep; None for none.
      offload_pattern: likewise, of values to keep in the host's memory.
      offload_dst: the kind of that memory.

    Returns:
      The `remat_spec` for the config of the stack's layer.
    """
    return RematSpec(
        # In a loop, nothing can be merged with what is computed again.
        prevent_cse=issubclass(stack_cfg.klass, StackedTransformerLayer),
        policy=config_for_function(save_and_offload_these_names_regex).set(
            names_which_can_be_saved=save_pattern,
            names_which_can_be_offloaded=offload_pattern,
            offload_dst=offload_dst,
        ),
    )
