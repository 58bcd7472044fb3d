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

from weft.errors import ArgumentValueError
from weft.functional.arrays import to_ndim
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
    implementation: AttentionImplementation | None, pairs: int, only_plain: str | None = None
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
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        arrays = tuple(_merge_batch(x, batch, 3) for x in mask.arrays)
        mask = jax.tree.map(lambda x: _merge_batch(x, batch, 1), mask.replace(arrays=()))
        mask = mask.replace(arrays=arrays)
    options |= {"bias": _merge_batch(bias, batch, 3), "logit_cap": logit_cap or None}
    out = _computed(implementation, _Call(query, key, value, mask, **options))
    return out.reshape(*batch, *out.shape[1:])


def _merge_batch(x: Array | None, batch: list[int], others: int) -> Array | None:
    """Merges the axes of the batch into one; some may be missing or of size 1."""
    if x is None:
        return None
    x = to_ndim(x, len(batch) + others)
    sizes, rest = x.shape[:-others], x.shape[-others:]
    if all(n == 1 for n in sizes):
        return x.reshape(1, *rest)
    return jnp.broadcast_to(x, (*batch, *rest)).reshape(-1, *rest)


def _computed(implementation: AttentionImplementation | None, call: _Call) -> Array:
    kernels = _KERNELS_OF.get(jax.default_backend(), ()) if implementation is None else ()
    for name in [implementation] if implementation in _KERNELS else kernels:
        try:
            return _KERNELS[name](call)
        except _KernelRefusal as refusal:
            if implementation is not None:
                raise _cannot(implementation, str(refusal)) from refusal.__cause__
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
    window, exact = window_of(mask.mask_fn)
    reasons = {
        "it has no dropout": call.dropout_rate > 0,
        "it has no logit sinks": call.logit_sink is not None,
        "it has no ALiBi": call.alibi_slopes is not None,
        "it has no segment ids": mask.query_segments is not None,
        "its masks are windows, not other functions of positions": not exact,
        "its positions count from 0": mask.query_positions is not None
        or mask.key_positions is not None,
        **reasons,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise _KernelRefusal(reason)
    left, right = window.left_context, window.right_context
    if left is None and right in (None, 0):
        return {"is_causal": right == 0}
    lengths = call.query.shape[1], call.key.shape[1]
    return {
        "is_causal": right == 0,
        "local_window_size": tuple(
            max(lengths) if size is None else size for size in (left, right)
        ),
    }


def _cudnn(call: _Call) -> Array:
    query, key, value = call.query, call.key, call.value
    window, _ = window_of(call.mask.mask_fn)
    all_pairs = (query.shape[1], key.shape[1])
    odd = call.bias is not None and any(n % 2 for n in all_pairs)
    arguments = _window(
        call,
        {
            f"it computes in float16 and bfloat16, and the query is {query.dtype}": query.dtype
            not in (jnp.float16, jnp.bfloat16),
            "it has no caps of logits": call.logit_cap is not None,
            "its values have the size of its keys": query.shape[-1] != value.shape[-1],
            "its windows are causal": window.right_context != 0 and window != Window(),
            "its biases and masks have a row per query and a column per key": any(
                x is not None and x.shape[-2:] != all_pairs for x in (call.bias, *call.mask.arrays)
            ),
            f"with a bias, its lengths are even, and they are {all_pairs}": odd,
        },
    )
    mask = call.mask.replace(mask_fn=None).to_array(1, 1) if call.mask.arrays else None
    try:
        return jax.nn.dot_product_attention(
            query, key, value, call.bias, mask,
            scale=call.scale, implementation="cudnn", **arguments,
        )  # fmt: skip
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise _KernelRefusal(str(error).rstrip(".")) from error


def _tokamax(call: _Call) -> Array:
    both = call.bias is not None and call.logit_cap is not None
    arguments = _window(
        call,
        {
            "it is not installed (pip install 'weft[kernels]')": importlib.util.find_spec("tokamax")
            is None,
            "it caps the sum of logits and bias": both,
        },
    )
    import tokamax  # pyright: ignore[reportMissingImports] - an extra

    mask = call.mask.replace(mask_fn=None).to_array(1, 1) if call.mask.arrays else None
    try:
        return tokamax.dot_product_attention(
            call.query, call.key, call.value, call.bias, mask,
            scale=call.scale, logits_soft_cap=call.logit_cap, precision=call.precision,
            implementation=_TOKAMAX_KERNELS, **arguments,
        )  # fmt: skip
    except (NotImplementedError, ValueError, ExceptionGroup) as error:
        raise _KernelRefusal(f"{type(error).__name__}: {error}".rstrip(".")) from error


_KERNELS: dict[str, Callable[[_Call], Array]] = {"cudnn": _cudnn, "tokamax": _tokamax}
