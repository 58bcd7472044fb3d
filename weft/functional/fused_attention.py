"""Implementations of attention that hold no logits of all pairs, and the choice between them.

    "plain"      logits of all pairs of queries and keys: for short sequences, and for what needs
                 the probabilities or a forward-mode derivative
    "blockwise"  `weft.functional.blockwise_attention`, on any device
    "cudnn"      the fused kernel of cuDNN, on GPUs of NVIDIA, in float16 and bfloat16
    "tokamax"    kernels of the library tokamax (the extra `kernels`), on GPUs and TPUs

Without a choice of the caller, short sequences (fewer than 1024² pairs) are computed by "plain",
others by the first of "cudnn", "tokamax" and "blockwise" that can, on its device. What a kernel
cannot compute is logged once.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array

from weft.errors import ArgumentValueError, describe_error
from weft.functional.arrays import platform, to_ndim
from weft.functional.attention_mask import AttentionMask, Window, window_of
from weft.functional.blockwise_attention import blockwise_attention

AttentionImplementation = Literal["plain", "blockwise", "cudnn", "tokamax"]
"""Implementations of attention; see `dot_product_attention`."""

# Pairs of a query and a key from which on blocks are faster than all logits at once
# (benchmarks/attention.py).
_MANY_PAIRS = 1024**2
_KERNELS_OF = {"gpu": ("cudnn", "tokamax"), "tpu": ("tokamax",)}
# Those of tokamax whose memory is linear in the lengths, in the order in which they are tried.
_TOKAMAX_KERNELS = ("mosaic", "triton")
_logger = logging.getLogger(__name__)


class _Call(NamedTuple):
    """Arguments of attention, with one axis for the batch."""

    query: Array
    key: Array
    value: Array
    mask: AttentionMask
    bias: Array | None = None
    alibi_slopes: Array | None = None
    scale: float | None = None
    logit_cap: float | None = None
    logit_sink: Array | None = None
    dropout_rate: float = 0.0
    dropout_key: Array | None = None
    broadcast_dropout: bool = False
    masked_gradient: bool = True
    precision: Any = None


class _KernelRefusal(Exception):
    """A kernel cannot compute this attention."""


def is_plain(
    implementation: AttentionImplementation | None,
    pairs: int,
    only_plain: str | None = None,
) -> bool:
    """Returns whether the plain implementation computes attention of a number of pairs.

    `only_plain` is what is asked for, where only the plain implementation can do it.

    Raises:
        ArgumentValueError: as `fused_attention` does, except for what a kernel cannot compute.
    """
    if implementation not in (None, *get_args(AttentionImplementation)):
        names = ", ".join(map(repr, get_args(AttentionImplementation)))
        raise ArgumentValueError(
            f"implementation={implementation!r} of attention; expected one of {names}, or None to "
            "let device, lengths and arguments decide."
        )
    if implementation is None:
        return only_plain is not None or pairs < _MANY_PAIRS
    if implementation != "plain" and only_plain is not None:
        raise _cannot(implementation, only_plain)
    return implementation == "plain"


def fused_attention(
    implementation: AttentionImplementation | None,
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: AttentionMask,
    bias: Array | None = None,
    logit_cap: float | None = None,
    **options: Any,
) -> Array | None:
    """Returns attention without logits of all pairs, or None if it is to be the plain one.

    Arguments are those of `dot_product_attention`, with any number of axes of the batch, and
    `broadcast_dropout` and `masked_gradient` of `blockwise_attention`.

    Raises:
        ArgumentValueError: if an implementation that is asked for cannot compute it.
    """
    *batch, target, _, _ = query.shape
    if is_plain(implementation, target * key.shape[-3]):
        return None
    if len(batch) != 1:
        query = query.reshape(-1, *query.shape[-3:])
        key = key.reshape(-1, *key.shape[-3:])
        value = value.reshape(-1, *value.shape[-3:])
        # Positions and segment ids have one axis after those of the batch, arrays three.
        arrays = tuple(_merge_batch(x, batch, 3) for x in mask.arrays)
        mask = jax.tree.map(
            lambda x: _merge_batch(x, batch, 1), mask.replace(arrays=())
        )
        mask = mask.replace(arrays=arrays)
    if bias is not None:
        bias = _merge_batch(bias, batch, 3)
    call = _Call(
        query,
        key,
        value,
        mask,
        bias=bias,
        logit_cap=logit_cap or None,
        **options,
    )
    out = _compute(implementation, call)
    return out.reshape(*batch, *out.shape[1:])


def _merge_batch(x: Array, batch: list[int], num_last_axes: int) -> Array:
    """Merges the axes of the batch into one; some may be missing or of size 1."""
    x = to_ndim(x, len(batch) + num_last_axes)
    batch_shape, last_shape = x.shape[:-num_last_axes], x.shape[-num_last_axes:]
    if set(batch_shape) <= {1}:
        return x.reshape(1, *last_shape)
    return jnp.broadcast_to(x, (*batch, *last_shape)).reshape(-1, *last_shape)


def _compute(
    implementation: AttentionImplementation | None, call: _Call
) -> Array:
    if implementation is None:
        kernels = _KERNELS_OF.get(platform(), ())
    elif implementation in _KERNELS:
        kernels = (implementation,)
    else:
        kernels = ()
    for name in kernels:
        try:
            return _KERNELS[name](call)
        except _KernelRefusal as refusal:
            if implementation is not None:
                raise _cannot(
                    implementation, str(refusal)
                ) from refusal.__cause__
            _log_once(f"{name} cannot compute this attention: {refusal}.")
    return blockwise_attention(**call._asdict())


def _cannot(implementation: str, reason: str) -> ArgumentValueError:
    return ArgumentValueError(
        f"implementation={implementation!r} cannot compute this attention: {reason}. Use "
        'implementation="plain" or "blockwise", or None to choose one that can.'
    )


@functools.cache
def _log_once(message: str) -> None:
    _logger.info(message)


def _window(call: _Call, reasons: dict[str, bool]) -> dict[str, Any]:
    """Returns the arguments of a kernel for the mask; raises what it cannot do, with `reasons`."""
    mask = call.mask
    window, is_exact = window_of(mask.mask_fn)
    has_positions = (
        mask.query_positions is not None or mask.key_positions is not None
    )
    reasons = {
        "it has no dropout": call.dropout_rate > 0,
        "it has no logit sinks": call.logit_sink is not None,
        "it has no ALiBi": call.alibi_slopes is not None,
        "it has no segment ids": mask.query_segments is not None,
        "its masks are windows, not other functions of positions": not is_exact,
        "its positions count from 0": has_positions,
        **reasons,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise _KernelRefusal(reason)
    is_causal = window.right_context == 0
    if window.left_context is None and (
        is_causal or window.right_context is None
    ):
        return {"is_causal": is_causal}
    unlimited = max(call.query.shape[1], call.key.shape[1])
    window_size = []
    for context in (window.left_context, window.right_context):
        window_size.append(unlimited if context is None else context)
    return {"is_causal": is_causal, "local_window_size": tuple(window_size)}


def _mask_array(call: _Call) -> Array | None:
    """Returns what of the mask is not a window, for kernels that take both."""
    if not call.mask.arrays:
        return None
    return call.mask.replace(mask_fn=None).to_array(1, 1)


def _cudnn(call: _Call) -> Array:
    query, key, value = call.query, call.key, call.value
    window, _ = window_of(call.mask.mask_fn)
    all_pairs = (query.shape[1], key.shape[1])
    has_16_bits = query.dtype in (jnp.float16, jnp.bfloat16)
    broadcasts_pairs = False
    for x in (call.bias, *call.mask.arrays):
        if x is not None and x.shape[-2:] != all_pairs:
            broadcasts_pairs = True
    has_odd_length = any(length % 2 for length in all_pairs)
    reasons = {
        f"it computes in float16 and bfloat16, and the query is {query.dtype}": not has_16_bits,
        "it has no caps of logits": call.logit_cap is not None,
        "its values have the size of its keys": query.shape[-1]
        != value.shape[-1],
        "its windows are causal": window.right_context != 0
        and window != Window(),
        "its biases and masks have a row per query and a column per key": broadcasts_pairs,
        f"with a bias, its lengths are even, and they are {all_pairs}": call.bias
        is not None
        and has_odd_length,
    }
    arguments = _window(call, reasons)
    try:
        return jax.nn.dot_product_attention(
            query, key, value, call.bias, _mask_array(call),
            scale=call.scale, implementation="cudnn", **arguments,
        )  # fmt: skip
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise _KernelRefusal(str(error).rstrip(".")) from error


def _tokamax(call: _Call) -> Array:
    is_installed = importlib.util.find_spec("tokamax") is not None
    caps_bias = call.bias is not None and call.logit_cap is not None
    reasons = {
        "it is not installed (pip install 'weft-jax[kernels]')": not is_installed,
        "it caps the sum of logits and bias": caps_bias,
    }
    arguments = _window(call, reasons)
    import tokamax  # pyright: ignore[reportMissingImports] - an extra

    try:
        return tokamax.dot_product_attention(
            call.query, call.key, call.value, call.bias, _mask_array(call),
            scale=call.scale, logits_soft_cap=call.logit_cap, precision=call.precision,
            implementation=_TOKAMAX_KERNELS, **arguments,
        )  # fmt: skip
    except (NotImplementedError, ValueError, ExceptionGroup) as error:
        raise _KernelRefusal(describe_error(error).rstrip(".")) from error


_KERNELS: dict[str, Callable[[_Call], Array]] = {
    "cudnn": _cudnn,
    "tokamax": _tokamax,
}
