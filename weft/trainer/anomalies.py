"""Steps that are not to be trusted: of a loss or gradients that are no numbers, or of a jump.

Whether a step is one of them is decided in the compiled step, from the loss, the gradients, all
that the step has changed, and moving averages of the losses before; so all devices and processes
decide alike. The update of such a step is not applied. What follows is up to the policy:

    stop      the run ends with an error that names the step, the first module, the parameters
    skip      the step is counted, and the next batch comes
    rewind    the last checkpoint is restored, and training goes on with the batches that follow
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from weft import lifting
from weft.config import Configurable, config_class
from weft.errors import AnomalyPolicyError, LossSpikeError, UndefinedLossException
from weft.hierarchy.transforms import CONTEXTS
from weft.lifting.stages import Lowered
from weft.trainer.diagnosis import UNKNOWN, Diagnosis
from weft.trainer.optimizer_base import path_name, tree_paths
from weft.trainer.optimizer_clipping import norm_by_squares
from weft.trainer.optimizer_skipping import tree_where
from weft.trainer.train_step import loss_is_finite
from weft.typing import Tensor

logger = logging.getLogger(__name__)

Action = Literal["stop", "skip", "rewind"]
_SHOWN_PARAMETERS = 3


class LossTrack(NamedTuple):
    """What the compiled step remembers of the steps before.

    Attributes:
        count: the number of losses in the averages.
        mean: their moving average.
        square: that of their squares.
        skipped: how many steps were skipped.
        in_a_row: how many of them just now, one after the other.
        undefined: whether the step was undefined.
        spike: whether its loss was a spike.
        bad_leaves: for each array of the state with floating-point numbers whether it became
            undefined.
        bad_gradients: for each gradient that has to be a number whether it is none.
    """

    count: Any
    mean: Any
    square: Any
    skipped: Any
    in_a_row: Any
    undefined: Any
    spike: Any
    bad_leaves: Any
    bad_gradients: Any


class AnomalyPolicy(Configurable):
    """What to do about steps that are not to be trusted.

    With a policy, each step is waited for before the next one is started.

    Raises:
        AnomalyPolicyError: if the config asks for what does not go together.

    >>> cfg = AnomalyPolicy.default_config().set(on_undefined="skip", on_spike="rewind")
    >>> cfg.set(spike_stddevs=8.0).instantiate().config.max_rewinds
    3
    """

    @config_class
    class Config(Configurable.Config):
        """Configures an AnomalyPolicy.

        Attributes:
            on_undefined: what to do if the loss, a gradient, or anything that the step has changed,
                is NaN or infinite: "stop", "skip" or "rewind". Gradients do not count
                where the learner itself skips such steps, as with a `loss_scale`.
            on_spike: what to do if the loss is a spike, likewise; None not to look for spikes.
            spike_factor: a loss above this many times the mean of those before is a spike.
            spike_stddevs: a loss this many standard deviations above the mean is a spike. Where
                both are given, a spike is above both.
            spike_decay: by which the averages forget.
            spike_min_steps: after how many steps the averages are trusted.
            max_skips_in_a_row: after how many skipped steps one after the other the run stops.
            max_rewinds: after how many rewinds the next one stops the run.
        """

        on_undefined: Action = "stop"
        on_spike: Action | None = None
        spike_factor: float | None = None
        spike_stddevs: float | None = None
        spike_decay: float = 0.98
        spike_min_steps: int = 50
        max_skips_in_a_row: int = 20
        max_rewinds: int = 3

    def __init__(self, config: Config):
        super().__init__(config)
        cfg = self.config
        thresholds = (cfg.spike_factor, cfg.spike_stddevs)
        if cfg.on_spike is not None and thresholds == (None, None):
            raise AnomalyPolicyError(
                f"anomaly_policy.on_spike={cfg.on_spike!r}, but nothing says what a spike is. Set "
                "spike_stddevs=8.0, or spike_factor=3.0."
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
        # Of averages that began at 0, as Adam's are.
        share = 1 - cfg.spike_decay ** jnp.maximum(track.count, 1).astype(jnp.float32)
        mean = track.mean / share
        stddev = jnp.sqrt(jnp.maximum(track.square / share - jnp.square(mean), 0))
        spike = track.count >= cfg.spike_min_steps
        if cfg.spike_stddevs is not None:
            spike &= loss > mean + cfg.spike_stddevs * stddev
        if cfg.spike_factor is not None:
            spike &= loss > cfg.spike_factor * mean
        return spike

    def judged(
        self, state: Any, track: LossTrack, new_state: Any, loss: Tensor, gradients: Any = None
    ) -> tuple[Any, LossTrack]:
        """The state and the track after a step, in its compilation: the old ones if it was bad.

        Args:
            state: before the step.
            track: likewise.
            new_state: after it.
            loss: of it.
            gradients: of those parameters whose gradients have to be numbers.
        """
        cfg = self.config
        loss = loss.astype(jnp.float32)
        pairs = zip(_float_leaves(new_state), _float_leaves(state), strict=True)
        # What was undefined before, such as an infinite threshold, is meant to be.
        bad_leaves = jnp.stack([~_finite(new) & _finite(old) for (_, new), (_, old) in pairs])
        bad_gradients = _undefined(gradients)
        undefined = ~jnp.isfinite(loss) | jnp.any(bad_leaves) | jnp.any(bad_gradients)
        spike = ~undefined & self._is_spike(loss, track)
        bad = undefined | spike
        skipped = (undefined & (cfg.on_undefined == "skip")) | (spike & (cfg.on_spike == "skip"))
        kept = tree_where(~bad, new_state, state)
        # Where nothing is skipped the step has not been, and its key is for finding the cause.
        key = jnp.where(bad & ~skipped, state.prng_key, new_state.prng_key)

        # Infinite, it would stay in the average for good, and there would be no spikes.
        square = jnp.minimum(jnp.square(loss), jnp.finfo(jnp.float32).max)

        def averaged(average: Tensor, x: Tensor) -> Tensor:
            return jnp.where(bad, average, cfg.spike_decay * average + (1 - cfg.spike_decay) * x)

        return kept._replace(prng_key=key), LossTrack(
            count=track.count + ~bad,
            mean=averaged(track.mean, loss),
            square=averaged(track.square, square),
            skipped=track.skipped + skipped,
            in_a_row=jnp.where(skipped, track.in_a_row + 1, 0),
            undefined=undefined,
            spike=spike,
            bad_leaves=bad_leaves,
            bad_gradients=bad_gradients,
        )


class AnomalyGuard:
    """A policy at work in a run; its counts and averages belong to the checkpoint.

    Args:
        policy: what to do.
        step: the training step, from state and batch to the new state and its outputs.
        shardings: of the state.
        mesh: of the run.
    """

    def __init__(
        self,
        policy: AnomalyPolicy,
        step: Callable[..., tuple[Any, dict[str, Any]]],
        *,
        shardings: Any,
        mesh: jax.sharding.Mesh,
    ):
        self._policy = policy
        self._diagnosis = Diagnosis(step)
        self._gradient_names: list[str] = []
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._track = LossTrack(0, 0.0, 0.0, 0, 0, False, False, (), ())
        self._rewinds = 0

        def train_step(state_and_track: Any, batch: Any) -> Any:
            state, track = state_and_track
            new_state, outputs = step(state, batch, with_gradients=True)
            gradients = outputs.pop("gradients")
            self._gradient_names = jax.tree.leaves(tree_paths(gradients))
            state, track = policy.judged(state, track, new_state, outputs["loss"], gradients)
            outputs["summaries"] = {
                **outputs["summaries"],
                "anomalies": {"skipped_steps": track.skipped},
            }
            return (state, track), outputs

        layout = (shardings, self._replicated)
        self._jitted = lifting.jit(
            CONTEXTS,
            train_step,
            in_shardings=(layout, None),
            out_shardings=(layout, None),
            donate_argnums=0,
        )

    def __call__(self, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Runs a step; the state after it is the one before if the step was bad."""
        return self._run(self._jitted, (state, batch), {})

    def _run(self, jitted: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        state, batch = args
        (state, track), outputs = jitted((state, self._placed()), batch, **kwargs)
        self._track = LossTrack(*map(np.asarray, track))
        return state, outputs

    def lower(self, state: Any, batch: Any) -> Lowered:
        """As `jax.jit(...).lower` of the step."""
        return Lowered(self._jitted.lower((state, self._placed()), batch), self._run)

    def _placed(self) -> LossTrack:
        track, dtypes = self._track, (jnp.int32, jnp.float32, jnp.float32, jnp.int32, jnp.int32)
        values: Any = [np.asarray(x, dtype) for x, dtype in zip(track, dtypes, strict=False)]
        values += [np.zeros((), bool), np.zeros((), bool), np.zeros(0, bool), np.zeros(0, bool)]
        return jax.device_put(LossTrack._make(values), self._replicated)

    # The state, for checkpoints.

    def get_state(self) -> dict[str, Any]:
        """The averages and counts as JSON."""
        track = self._track
        return {
            "count": int(track.count),
            "mean": float(track.mean),
            "square": float(track.square),
            "skipped": int(track.skipped),
            "in_a_row": int(track.in_a_row),
            "rewinds": self._rewinds,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from saved averages and counts; rewinds of this start of the run stay counted."""
        state = dict(state)
        self._rewinds = max(self._rewinds, state.pop("rewinds"))
        self._track = self._track._replace(**state)

    # After a step.

    def wants_rewind(self, step: int, loss: Tensor, state: Any, batch: Any) -> bool:
        """Looks at the step that was just run.

        Args:
            step: its number.
            loss: of it.
            state: after it, as `__call__` gave it.
            batch: of the step.

        Returns:
            Whether the last checkpoint is to be restored, and the data to go on where it is.

        Raises:
            UndefinedLossException: if it is undefined and the policy is to stop, or it happened too
                often.
            LossSpikeError: likewise for a spike.
        """
        cfg, track = self._policy.config, self._track
        if not (track.undefined or track.spike):
            return False
        action = cfg.on_undefined if track.undefined else cfg.on_spike
        text = self._described(step, float(loss), state, batch)
        if action == "skip" and track.in_a_row < cfg.max_skips_in_a_row:
            logger.warning("%s The step is skipped; %d so far.", text, int(track.skipped))
            return False
        if action == "rewind" and self._rewinds < cfg.max_rewinds:
            self._rewinds += 1
            logger.warning(
                "%s The run goes back to its last checkpoint and on to other batches, for the "
                "%d. time of at most %d.",
                text,
                self._rewinds,
                cfg.max_rewinds,
            )
            return True
        if action == "skip":
            text += f" It is the {int(track.in_a_row)}. in a row that had to be skipped."
        elif action == "rewind":
            text += f" The run was rewound {self._rewinds} times before."
        error = UndefinedLossException if track.undefined else LossSpikeError
        raise error(
            f"{text} Its update was not applied; the last checkpoint is from before. Lower the "
            "learning rate or clip gradients, look at the batch, or let such steps be skipped: "
            f"anomaly_policy.{'on_undefined' if track.undefined else 'on_spike'}='skip'."
        )

    def _described(self, step: int, loss: float, state: Any, batch: Any) -> str:
        track = self._track
        if track.spike:
            return f"the loss of step {step} is {loss:.4g}, and was {self._mean():.4g} on average."
        text = f"step {step} is undefined: its loss is {loss:g}."
        fields = [path_name(path) for path, x in _float_leaves(batch) if not np.all(_finite(x))]
        if fields:
            text += f" The batch has undefined numbers in {', '.join(fields)}."
        module = self._diagnosis.first_module(state, batch)
        if module is not None:
            text += f" The first module with an undefined output is {module}."
        elif np.isfinite(loss):
            text += " The outputs of all modules are finite."
        if np.isfinite(loss) and module in (None, UNKNOWN):
            text += self._described_gradients(state, batch)
        leaves = _float_leaves(state)
        bad = [path for (path, _), is_bad in zip(leaves, track.bad_leaves, strict=True) if is_bad]
        names = [path_name(path[1:]) for path in bad if path[0].name == "model"]
        return text + (f" It would have made undefined: {_listed(names)}." if names else "")

    def _described_gradients(self, state: Any, batch: Any) -> str:
        names = self._gradient_names
        pairs = zip(names, self._track.bad_gradients, strict=True)
        bad = [name for name, is_bad in pairs if is_bad]
        if not bad:
            return " The gradients are as well, so it is the learner's update." if names else ""
        module, bad = self._diagnosis.first_gradient(state, batch, bad, names)
        if module is None:
            return f" The gradient is undefined of {_listed(bad)}."
        return (
            f" In the backward pass the first module with an undefined gradient is {module}; the "
            f"parameters are, in its order, {_listed(bad)}."
        )

    def _mean(self) -> float:
        count = max(int(self._track.count), 1)
        return float(self._track.mean) / (1 - self._policy.config.spike_decay**count)


def _float_leaves(state: Any) -> list[tuple[Any, Any]]:
    """Paths and values of the arrays with floating-point numbers."""
    found = jax.tree_util.tree_flatten_with_path(state)[0]
    return [(path, x) for path, x in found if jnp.issubdtype(x.dtype, jnp.floating)]


def _finite(x: Tensor) -> Tensor:
    return jnp.all(jnp.isfinite(x))


def _undefined(gradients: Any) -> Tensor:
    """For each gradient whether it is no number."""

    def by_leaf(gradients: Any) -> Tensor:
        bad = (~_finite(x) for x in jax.tree.leaves(gradients))
        return jnp.stack([jnp.zeros((), bool), *bad])[1:]

    def none(gradients: Any) -> Tensor:
        return jnp.zeros(len(jax.tree.leaves(gradients)), bool)

    # If their norm is a number, all are; the compiler computes it once for the learner and here.
    return jax.lax.cond(jnp.isfinite(norm_by_squares(gradients)), none, by_leaf, gradients)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_PARAMETERS
    return ", ".join(names[:_SHOWN_PARAMETERS]) + (f" and {more} more" if more > 0 else "")


def check_loss(loss: Tensor, step: int) -> None:
    """Where a run has no policy: ends it at a loss that is undefined.

    Args:
        loss: of the step, which is waited for.
        step: its number.

    Raises:
        UndefinedLossException: if it is.
    """
    if not loss_is_finite(loss):
        raise UndefinedLossException(
            f"the loss after step {step} is {float(loss)}; the last checkpoint is from before. "
            "Lower the learning rate or clip gradients, or let the learner skip such steps: "
            "`learner.ignore_undefined_loss=True`. With an `anomaly_policy` the first module and "
            "parameters are named, and the run can skip such steps, or rewind."
        )
