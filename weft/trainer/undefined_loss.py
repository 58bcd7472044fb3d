"""The end of a run whose loss is undefined, with what to look at first.

The first loss does not depend on the learning rate, since no update precedes it. Its causes are, in
order of likelihood: the batch; initial parameters; ids outside of a table; the range of float16;
logarithms, roots and divisions in the module with the first undefined output. If the first loss was
finite, the learning rate comes first; but if only gradients are undefined, a derivative.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from weft.errors import UndefinedLossException
from weft.trainer.display import scalar
from weft.trainer.first_nonfinite import UNKNOWN
from weft.trainer.model import cast_for_forward
from weft.trainer.optimizers.base import path_name
from weft.trainer.train_step import TrainerState, loss_is_finite
from weft.typing import NestedTensor, Tensor

_CONTINUE = (
    "`learner.ignore_undefined_loss=True` skips such steps. An `anomaly_policy` names the first "
    "module and the parameters in any step, and lets the run skip such steps or rewind."
)


def check_loss(loss: Tensor, step: int, look_first: Callable[[], str] | None = None) -> None:
    """Raises UndefinedLossException if a step's loss, for which it waits, is undefined.

    Args:
        look_first: returns what to look at first; called for an undefined loss only.
    """
    if loss_is_finite(loss):
        return
    advice = (
        "Look first at the learning rate and the batch." if look_first is None else look_first()
    )
    raise UndefinedLossException(
        f"the loss after step {step} is {float(loss)}; the last checkpoint predates it. {advice} "
        f"{_CONTINUE}"
    )


def advice_for_later_step(summaries: Mapping[str, Any], batch: NestedTensor) -> str:
    """Returns what to look at first if the first loss of the run was finite."""
    wrong_batch, rate = _batch_text(batch), scalar(summaries, "learning_rate")
    first = "The first loss of the run was finite, so look first"
    if wrong_batch:
        first = f"{wrong_batch} Look then"
    shown = "" if rate is None else f", {float(rate):.3g} in this step"
    return (
        f"{first} at the learning rate{shown}: lower it, warm up for longer, or clip gradients by "
        "their norm."
    )


def advice_for_gradients(batch: NestedTensor, *, updated: bool) -> str:
    """Returns what to look at first if the loss is finite, and gradients are not.

    Args:
        updated: whether an earlier update may be the cause.
    """
    return _batch_text(batch) or (
        "Look there first for a root or norm of 0, whose derivative is infinite, and for a "
        "logarithm, root or division whose undefined result `jnp.where` drops: its gradient stays "
        "undefined, so replace what goes in."
        + (" Look then at the learning rate." if updated else "")
    )


def advice_for_first_step(
    find_module: Callable[[], str | None],
    state: TrainerState,
    batch: NestedTensor,
    train_dtype: Any,
) -> str:
    """Returns what to look at first if the first loss of a run is undefined.

    Args:
        find_module: returns the first module with an undefined output, see `NonfiniteSearch`.
        state: the state before the step.
    """
    wrong_batch = _batch_text(batch)
    if wrong_batch:
        return wrong_batch
    names = undefined_names(state.model)
    if names:
        return (
            f"Initial parameters are undefined: {', '.join(names[:3])}. Look first at their "
            "initializers, or at the weights that the run starts from."
        )
    module = find_module()
    text = "The batch and the initial parameters are finite"
    if module not in (None, UNKNOWN):
        text += f"; the first module with an undefined output is {module}"
    if module is not None and re.search(r", a (Embed|Embedding) \(", module):
        ranges = ", ".join(f"{name} from {low} to {high}" for name, low, high in _ids(batch))
        return f"{text}. Look first at its ids, which need a row each: the batch has {ranges}."
    cast = jax.eval_shape(lambda p, b: cast_for_forward(p, b, train_dtype), state.model, batch)
    if any(x.dtype == jnp.float16 for x in jax.tree.leaves(cast)):
        return (
            f"{text}. Look first at the range of float16, which ends at 65504: train in bfloat16, "
            "or scale what is larger; then for a logarithm or root of 0 or less."
        )
    return f"{text}. Look there first for a logarithm or root of 0 or less, and a division by 0."


def _batch_text(batch: NestedTensor) -> str | None:
    names = undefined_names(batch)
    if not names:
        return None
    return f"The batch has undefined numbers in {', '.join(names)}: look at the input first."


def undefined_names(tree: object) -> list[str]:
    """Returns the paths of floating-point arrays with a NaN or an infinity."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    floats = [(path, x) for path, x in found if jnp.issubdtype(x.dtype, jnp.floating)]
    return [path_name(path) for path, x in floats if not np.all(jnp.all(jnp.isfinite(x)))]


def _ids(batch: NestedTensor) -> list[tuple[str, int, int]]:
    found = jax.tree_util.tree_flatten_with_path(batch)[0]
    ids = [(path_name(path), x) for path, x in found if jnp.issubdtype(x.dtype, jnp.integer)]
    return [(name, int(jnp.min(x)), int(jnp.max(x))) for name, x in ids]
