"""Detection and handling of steps with undefined numbers or a loss spike.

The compiled step decides from the loss, the gradients, the new state and moving averages of
earlier losses, so that all devices and processes agree. The update of a bad step is not applied,
nor is that of the next one: the host reads the verdict on a step while the next one runs, and finds
the state as the bad step left it. The policy decides what follows, with the same next batch:

    stop      the run ends with an error that names the step, the first module, the parameters
    skip      the step is counted, and training continues with the next batch
    rewind    the last checkpoint is restored, and training continues with the batches that follow

Without a policy, a run ends when its loss is undefined. Either error says what to look at first.
The first loss does not depend on the learning rate, since no update precedes it. Its causes are, in
order of likelihood: the batch; initial parameters; ids outside of a table; the range of float16;
logarithms, roots and divisions in the module with the first undefined output. If the first loss was
finite, the learning rate comes first; but if only gradients are undefined, a derivative.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from weft.config import Configurable
from weft.debug import first_nonfinite
from weft.distributed.peers import join_first
from weft.errors import (
    AnomalyPolicyError,
    LossSpikeError,
    UndefinedLossException,
)
from weft.lifting.jit import Traced
from weft.report import readings
from weft.serialization.untrusted import check_json
from weft.trainer.model import cast_for_forward
from weft.trainer.optimizers.base import leaves_by_path, path_name, tree_paths
from weft.trainer.optimizers.clipping import norm_by_squares, tree_where
from weft.trainer.train_step import TrainerState, loss_is_finite
from weft.typing import NestedTensor, PartitionSpec, Tensor

logger = logging.getLogger(__name__)

_CONTINUE = (
    "`learner.ignore_undefined_loss=True` skips such steps. An `anomaly_policy` names the first "
    "module and the parameters in any step, and lets the run skip such steps or rewind."
)

Action = Literal["stop", "skip", "rewind"]


class LossTrack(NamedTuple):
    """Statistics of earlier steps, carried by the compiled step.

    Attributes:
        count: number of losses in the averages.
        mean: moving average of the losses.
        square: moving average of their squares.
        skipped: number of skipped steps.
        in_a_row: number of consecutive skipped steps up to now.
        held: whether the last step was bad; the next one then changes nothing.
    """

    count: Any = np.int32(0)
    mean: Any = np.float32(0)
    square: Any = np.float32(0)
    skipped: Any = np.int32(0)
    in_a_row: Any = np.int32(0)
    held: Any = np.False_


class Verdict(NamedTuple):
    """Judgment of the compiled step on itself.

    Attributes:
        track: statistics including this step.
        undefined: whether the loss, a gradient or a new value of the state is undefined.
        spike: whether the loss is a spike.
        bad_leaves: for each floating-point array of the state, whether it became undefined.
        bad_gradients: for each gradient that must be finite, whether it is not.
    """

    track: LossTrack
    undefined: Any
    spike: Any
    bad_leaves: Any
    bad_gradients: Any


class Step(NamedTuple):
    """A step that was dispatched: its number, what it returned and its batch."""

    number: int
    outputs: dict[str, Any]
    batch: NestedTensor
    verdict: Verdict | None = None


_SAVED = LossTrack._fields[:5]


class AnomalyPolicy(Configurable):
    """Policy for steps with undefined numbers or a loss spike.

    The host reads the verdict on a step while the next one runs, and repeats that one after a bad
    step. Contradictory fields raise AnomalyPolicyError.

    >>> cfg = AnomalyPolicy.default_config().set(on_undefined="skip", on_spike="rewind")
    >>> cfg.set(spike_stddevs=8.0).instantiate().config.max_rewinds
    3
    """

    class Config(Configurable.Config):
        """Configures an AnomalyPolicy."""

        on_undefined: Action = "stop"
        """Action if the loss, a gradient, or anything that the step has changed is NaN or infinite:
        "stop", "skip" or "rewind". Gradients do not count where the learner itself skips such
        steps, as with a `loss_scale`."""
        on_spike: Action | None = None
        """Action if the loss is a spike; None disables the detection."""
        spike_factor: float | None = None
        """A loss above this many times the mean of those before is a spike."""
        spike_stddevs: float | None = None
        """A loss this many standard deviations above the mean is a spike. If both are set, a spike
        exceeds both."""
        spike_decay: float = 0.98
        """Decay of the moving averages."""
        spike_min_steps: int = 50
        """Number of steps before spikes are detected."""
        max_skips_in_a_row: int = 20
        """Number of consecutive skipped steps that stops the run."""
        max_rewinds: int = 3
        """Number of rewinds after which the next one stops the run."""

    def __init__(self, config: Config):
        super().__init__(config)
        cfg = self.config
        thresholds = (cfg.spike_factor, cfg.spike_stddevs)
        if cfg.on_spike is not None and thresholds == (None, None):
            raise AnomalyPolicyError(
                f"anomaly_policy.on_spike={cfg.on_spike!r}, but no threshold is set. Set "
                "spike_stddevs=8.0 or spike_factor=3.0."
            )
        if not 0 < cfg.spike_decay < 1:
            raise AnomalyPolicyError(
                f"anomaly_policy.spike_decay={cfg.spike_decay:g}; expected a number between 0 and "
                "1, such as 0.98 for averages over about 50 steps."
            )

    def _is_spike(self, loss: Tensor, track: LossTrack) -> Tensor:
        cfg = self.config
        if cfg.on_spike is None:
            return jnp.zeros((), bool)
        # The averages begin at 0; this is Adam's bias correction.
        count = jnp.maximum(track.count, 1).astype(jnp.float32)
        correction = 1 - cfg.spike_decay**count
        mean = track.mean / correction
        variance = track.square / correction - jnp.square(mean)
        stddev = jnp.sqrt(jnp.maximum(variance, 0))
        is_spike = track.count >= cfg.spike_min_steps
        if cfg.spike_stddevs is not None:
            is_spike &= loss > mean + cfg.spike_stddevs * stddev
        if cfg.spike_factor is not None:
            is_spike &= loss > cfg.spike_factor * mean
        return is_spike

    def apply_to_step(
        self,
        state: TrainerState,
        track: LossTrack,
        new_state: TrainerState,
        loss: Tensor,
        gradients: NestedTensor | None = None,
    ) -> tuple[Any, Verdict]:
        """Returns the state after a step, and the verdict on it.

        It is traced into the compiled step. A step that is bad, or whose track is held, returns the
        old state. `gradients` are those that must be finite.
        """
        cfg = self.config
        loss = loss.astype(jnp.float32)
        became_undefined = []
        leaves = zip(
            _float_leaves(state), _float_leaves(new_state), strict=True
        )
        for (_, old_leaf), (_, new_leaf) in leaves:
            # Numbers that were undefined before, such as an infinite threshold, are intended.
            became_undefined.append(
                ~_is_finite(new_leaf) & _is_finite(old_leaf)
            )
        bad_leaves = jnp.stack(became_undefined)
        bad_gradients = _undefined_leaves(
            {} if gradients is None else gradients
        )
        undefined = (
            ~jnp.isfinite(loss) | jnp.any(bad_leaves) | jnp.any(bad_gradients)
        )
        spike = ~undefined & self._is_spike(loss, track)
        bad = undefined | spike | track.held
        skipped = (undefined & (cfg.on_undefined == "skip")) | (
            spike & (cfg.on_spike == "skip")
        )
        skipped &= ~jnp.asarray(track.held)
        returned_state = tree_where(~bad, new_state, state)
        # A bad step that is not skipped keeps its key, with which the diagnosis repeats it.
        key = jnp.where(bad & ~skipped, state.prng_key, new_state.prng_key)

        # An infinite square would stay in the average forever and disable spike detection.
        square = jnp.minimum(jnp.square(loss), jnp.finfo(jnp.float32).max)

        def averaged(average: Tensor, x: Tensor) -> Tensor:
            return jnp.where(
                bad,
                average,
                cfg.spike_decay * average + (1 - cfg.spike_decay) * x,
            )

        track = LossTrack(
            count=track.count + ~bad,
            mean=averaged(track.mean, loss),
            square=averaged(track.square, square),
            skipped=track.skipped + skipped,
            in_a_row=jnp.where(skipped, track.in_a_row + 1, 0),
            held=bad,
        )
        verdict = Verdict(track, undefined, spike, bad_leaves, bad_gradients)
        return returned_state._replace(prng_key=key), verdict


class Judge(Protocol):
    """Judge of steps, asked about each while the next one runs.

    Attributes:
        counts_late: whether a step only counts once it is judged, since it may be undone.
    """

    counts_late: bool

    def is_bad(self, step: Step) -> bool:
        """Returns whether a step is bad, so that the next one has changed nothing."""
        ...

    def must_rewind(self, step: Step, state: TrainerState) -> bool:
        """Returns whether to restore the last checkpoint after a bad step; `state` is as before."""
        ...


class LossCheck:
    """Judge that ends the run if the loss is undefined; at the first step and at an interval.

    Args:
        advise: returns what to look at first after an undefined loss.
    """

    counts_late = False

    def __init__(self, every_n_steps: int, advise: Callable[[Step], str]):
        self._every_n_steps = every_n_steps
        self._advise = advise

    def is_bad(self, step: Step) -> bool:
        if step.number == 1 or step.number % self._every_n_steps == 0:
            check_loss(
                step.outputs["loss"], step.number, lambda: self._advise(step)
            )
        return False

    def must_rewind(self, step: Step, state: TrainerState) -> bool:
        return False


class NoCheck:
    """Judge for a learner that itself handles undefined losses."""

    counts_late = False

    def is_bad(self, step: Step) -> bool:
        return False

    def must_rewind(self, step: Step, state: TrainerState) -> bool:
        return False


class AnomalyGuard:
    """Runs and judges steps under a policy; its counts and averages are saved with checkpoints."""

    counts_late = True

    def __init__(
        self,
        policy: AnomalyPolicy,
        step: Callable[..., tuple[Any, dict[str, Any]]],
        shardings: TrainerState,
        mesh: jax.sharding.Mesh,
        train_dtype: Any,
        compiler_options: dict[str, Any] | None,
    ):
        self._policy = policy
        self._train_dtype = train_dtype
        self._search = first_nonfinite.NonfiniteSearch(step)
        self._gradient_names: list[str] = []
        self._replicated = jax.sharding.NamedSharding(mesh, PartitionSpec())
        self._track = LossTrack()
        self._rewinds = 0

        def train_step(
            state: TrainerState, track: LossTrack, batch: NestedTensor
        ) -> tuple[Any, Verdict, dict[str, Any]]:
            new_state, outputs = step(state, batch, with_gradients=True)
            gradients = outputs.pop("gradients")
            self._gradient_names = jax.tree.leaves(tree_paths(gradients))
            loss = outputs["loss"]
            state, verdict = policy.apply_to_step(
                state, track, new_state, loss, gradients
            )
            outputs["summaries"] = {
                **outputs["summaries"],
                "anomalies": {"skipped_steps": verdict.track.skipped},
            }
            return state, verdict, outputs

        self._jitted = jax.jit(
            train_step,
            in_shardings=(shardings, self._replicated, None),
            out_shardings=(shardings, self._replicated, None),
            donate_argnums=0,
            compiler_options=compiler_options,
        )

    def __call__(
        self, state: TrainerState, batch: NestedTensor
    ) -> tuple[Any, dict[str, Any]]:
        """Dispatches a step, which returns the state unchanged if it or the last one is bad.

        Its outputs have a `verdict`, for `must_rewind`.
        """
        return self._run(self._jitted, (state, batch), {})

    def _run(
        self,
        jitted: Callable[..., Any],
        args: tuple[TrainerState, NestedTensor],
        kwargs: Mapping[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        state, batch = args
        state, verdict, outputs = jitted(
            state, self._replicated_track(), batch, **kwargs
        )
        self._track = verdict.track
        return state, {**outputs, "verdict": verdict}

    def trace(self, state: TrainerState, batch: NestedTensor) -> Traced:
        """Traces the step, as `jax.jit(...).trace` does."""
        return Traced(
            self._jitted.trace(state, self._replicated_track(), batch),
            self._run,
        )

    def _replicated_track(self) -> LossTrack:
        return jax.device_put(self._track, self._replicated)

    # The state, for checkpoints.

    def get_state(self) -> dict[str, Any]:
        """Returns the averages and counts as JSON values."""
        state = {name: getattr(self._track, name).item() for name in _SAVED}
        state["rewinds"] = self._rewinds
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Sets saved averages and counts; rewinds since the start of the process stay counted."""
        check_json(
            state, {"rewinds": int, **dict.fromkeys(_SAVED, (bool, float))}
        )
        self._rewinds = max(self._rewinds, state["rewinds"])
        empty_track = LossTrack()
        values = {}
        for name in _SAVED:
            values[name] = np.asarray(
                state[name], getattr(empty_track, name).dtype
            )
        self._track = LossTrack(**values)

    # After a step.

    def is_bad(self, step: Step) -> bool:
        """Waits for a step, and returns whether it is bad."""
        return step.verdict is not None and bool(step.verdict.track.held)

    def must_rewind(self, step: Step, state: TrainerState) -> bool:
        """Returns whether to restore the last checkpoint, after a bad step that returned `state`.

        The next step may have been dispatched; it has changed nothing, and is to be repeated.

        Raises:
            UndefinedLossException: if the step is undefined and the policy is to stop, or its limit
                of skips or rewinds is reached.
            LossSpikeError: the same for a spike.
        """
        verdict = jax.device_get(step.verdict)
        cfg = self._policy.config
        track, batch = verdict.track, step.batch
        loss = float(step.outputs["loss"])
        self._track = track._replace(held=np.False_)
        action = cfg.on_undefined if verdict.undefined else cfg.on_spike
        text, module = self._describe(step.number, loss, state, batch, verdict)
        if action == "skip" and track.in_a_row < cfg.max_skips_in_a_row:
            logger.warning(
                "%s The step is skipped; %d so far.", text, int(track.skipped)
            )
            return False
        if action == "rewind" and self._rewinds < cfg.max_rewinds:
            self._rewinds += 1
            logger.warning(
                "%s The run restores its last checkpoint and continues with later batches: rewind "
                "%d of %d.",
                text,
                self._rewinds,
                cfg.max_rewinds,
            )
            return True
        if action == "skip":
            text += f" {int(track.in_a_row)} consecutive steps were skipped."
        elif action == "rewind":
            text += f" The run was already rewound {self._rewinds} times."
        error = UndefinedLossException if verdict.undefined else LossSpikeError
        if (
            verdict.undefined
            and np.isfinite(loss)
            and np.any(verdict.bad_gradients)
        ):
            advice = advice_for_gradients(batch, updated=bool(track.count))
        elif verdict.undefined and not track.count and not np.isfinite(loss):
            advice = advice_for_first_step(
                lambda: module, state, batch, self._train_dtype
            )
        else:
            advice = advice_for_later_step({}, batch)
        field = "on_undefined" if verdict.undefined else "on_spike"
        raise error(
            f"{text} Its update was not applied; the last checkpoint predates it. {advice} "
            f"anomaly_policy.{field}='skip' skips such steps."
        )

    def _describe(
        self,
        step: int,
        loss: float,
        state: TrainerState,
        batch: NestedTensor,
        verdict: Verdict,
    ) -> tuple[str, str | None]:
        """Returns a text of a bad step, and its first module with an undefined output."""
        track = verdict.track
        if verdict.spike:
            mean = track.mean / (
                1 - self._policy.config.spike_decay ** max(track.count, 1)
            )
            return (
                f"the loss of step {step} is {loss:.4g}, and was {mean:.4g} on average.",
                None,
            )
        text = f"step {step} is undefined: its loss is {loss:g}."
        fields = undefined_names(batch)
        if fields:
            text += f" The batch has undefined numbers in {', '.join(fields)}."
        module = self._search.first_module(state, batch)
        if module is not None:
            text += f" The first module with an undefined output is {module}."
        elif np.isfinite(loss):
            text += " The outputs of all modules are finite."
        if np.isfinite(loss) and module in (None, first_nonfinite.UNKNOWN):
            text += self._describe_gradients(state, batch, verdict)
        names = []
        for (path, _), is_bad in zip(
            _float_leaves(state), verdict.bad_leaves, strict=True
        ):
            state_field, *parameter_path = path
            if is_bad and state_field.name == "model":
                names.append(path_name(tuple(parameter_path)))
        if names:
            text += f" Parameters undefined by its update: {_listed(names)}."
        return text, module

    def _describe_gradients(
        self, state: TrainerState, batch: NestedTensor, verdict: Verdict
    ) -> str:
        names = self._gradient_names
        if not names:
            return ""
        bad_names = []
        for name, is_bad in zip(names, verdict.bad_gradients, strict=True):
            if is_bad:
                bad_names.append(name)
        if not bad_names:
            return " The gradients are finite too; the learner's update is not."
        module, bad_names = self._search.first_gradient(
            state, batch, bad_names, names
        )
        if module is None:
            return f" Undefined gradients: {_listed(bad_names)}."
        return (
            f" In the backward pass the first module with an undefined gradient is {module}. "
            f"Undefined gradients, in backward order: {_listed(bad_names)}."
        )


def _float_leaves(
    state: NestedTensor | TrainerState,
) -> list[tuple[Any, Tensor]]:
    """Returns the floating-point arrays of a tree, with their key paths."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [
        (path, x) for path, x in leaves if jnp.issubdtype(x.dtype, jnp.floating)
    ]


def _is_finite(x: Tensor) -> Tensor:
    return jnp.all(jnp.isfinite(x))


def _undefined_leaves(gradients: NestedTensor) -> Tensor:
    """Returns for each gradient whether it has an undefined number."""

    def by_leaf(gradients: NestedTensor) -> Tensor:
        is_bad = [
            jnp.zeros((), bool)
        ]  # for no gradients: there is no stack of nothing
        for x in jax.tree.leaves(gradients):
            is_bad.append(~_is_finite(x))
        return jnp.stack(is_bad)[1:]

    def none(gradients: NestedTensor) -> Tensor:
        return jnp.zeros(len(jax.tree.leaves(gradients)), bool)

    # If their norm is finite, all are; the compiler shares the norm with the learner's.
    is_finite = jnp.isfinite(norm_by_squares(gradients))
    return jax.lax.cond(is_finite, none, by_leaf, gradients)


def _listed(names: Sequence[str]) -> str:
    return join_first(names, 3, ", ")


# What to look at first.


def check_loss(
    loss: Tensor, step: int, look_first: Callable[[], str] | None = None
) -> None:
    """Raises UndefinedLossException if a step's loss, for which it waits, is undefined.

    Args:
        look_first: returns what to look at first; called for an undefined loss only.
    """
    if loss_is_finite(loss):
        return
    advice = "Look first at the learning rate and the batch."
    if look_first is not None:
        advice = look_first()
    raise UndefinedLossException(
        f"the loss after step {step} is {float(loss)}; the last checkpoint predates it. {advice} "
        f"{_CONTINUE}"
    )


def advice_for_later_step(
    summaries: Mapping[str, Any], batch: NestedTensor
) -> str:
    """Returns what to look at first if the first loss of the run was finite."""
    batch_advice = _batch_text(batch)
    text = "The first loss of the run was finite, so look first at the learning rate"
    if batch_advice:
        text = f"{batch_advice} Look then at the learning rate"
    learning_rate = readings.scalar(summaries, "learning_rate")
    if learning_rate is not None:
        text += f", {float(learning_rate):.3g} in this step"
    return f"{text}: lower it, warm up for longer, or clip gradients by their norm."


def advice_for_gradients(batch: NestedTensor, *, updated: bool) -> str:
    """Returns what to look at first if the loss is finite, and gradients are not.

    Args:
        updated: whether an earlier update may be the cause.
    """
    batch_advice = _batch_text(batch)
    if batch_advice:
        return batch_advice
    text = (
        "Look there first for a root or norm of 0, whose derivative is infinite, and for a "
        "logarithm, root or division whose undefined result `jnp.where` drops: its gradient stays "
        "undefined, so replace what goes in."
    )
    if updated:
        text += " Look then at the learning rate."
    return text


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
    batch_advice = _batch_text(batch)
    if batch_advice:
        return batch_advice
    names = undefined_names(state.model)
    if names:
        return (
            f"Initial parameters are undefined: {', '.join(names[:3])}. Look first at their "
            "initializers, or at the weights that the run starts from."
        )
    module = find_module()
    text = "The batch and the initial parameters are finite"
    if module not in (None, first_nonfinite.UNKNOWN):
        text += f"; the first module with an undefined output is {module}"
    if module is not None and re.search(r", a (Embed|Embedding) \(", module):
        ranges = ", ".join(_id_ranges(batch))
        return f"{text}. Look first at its ids, which need a row each: the batch has {ranges}."
    cast_arrays = jax.eval_shape(
        lambda params, batch: cast_for_forward(params, batch, train_dtype),
        state.model,
        batch,
    )
    if any(x.dtype == jnp.float16 for x in jax.tree.leaves(cast_arrays)):
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


def undefined_names(tree: PyTree) -> list[str]:
    """Returns the paths of floating-point arrays with a NaN or an infinity."""
    names = []
    for path, x in leaves_by_path(tree).items():
        if jnp.issubdtype(x.dtype, jnp.floating) and not jnp.all(
            jnp.isfinite(x)
        ):
            names.append(path_name(path))
    return names


def _id_ranges(batch: NestedTensor) -> list[str]:
    """Returns the name, smallest and largest number of each array of integers."""
    ranges = []
    for path, x in leaves_by_path(batch).items():
        if jnp.issubdtype(x.dtype, jnp.integer):
            ranges.append(
                f"{path_name(path)} from {int(jnp.min(x))} to {int(jnp.max(x))}"
            )
    return ranges
