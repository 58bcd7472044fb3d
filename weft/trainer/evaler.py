"""Evalers: evaluation of a model on its own data, at the steps that a policy selects.

The evaler provides batches, its metric calculator computes the metrics, and its writer writes them.
It calls its policy after every step with the training summaries and, under "evalers", the summaries
of earlier evalers at the same step. A policy with `get_state` and `set_state` is saved.

Early stopping ends a run when an evaler's metric has not improved for a while.
"""

import contextlib
import os
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Protocol

import jax

from weft import config as config_lib
from weft import errors, hierarchy
from weft.distributed.preemption import batches_until_stopped
from weft.inference.output import BaseOutputWriter
from weft.input import Input, host_to_global_device_array
from weft.serialization.untrusted import check_json
from weft.trainer.checkpointer.policy import BestMetric, EvalMetric
from weft.trainer.hooks import EARLY_STOPPING, EndRun, Hook, RunningTrainer
from weft.trainer.metric_calculator import (
    BaseMetricCalculator,
    ModelSummaryAccumulator,
)
from weft.trainer.summary_writer.files import SummaryWriter
from weft.typing import (
    DType,
    Nested,
    NestedTensor,
    PartitionSpec,
    PyTree,
    Tensor,
)


class EvalPolicy(Protocol):
    """Function that decides whether to evaluate."""

    def __call__(self, *, step: int, train_summaries: dict[str, Any]) -> bool:
        """Returns whether to evaluate after this step."""
        ...


def every_n_steps_policy(
    n: int = 1, *, min_step: int = 1, max_step: int | None = None
) -> EvalPolicy:
    """Returns a policy that evaluates after every n-th step from `min_step` on, and `max_step`.

    Raises StepIntervalError if n is below 1.

    >>> policy = every_n_steps_policy(40, max_step=100)
    >>> [step for step in range(101) if policy(step=step, train_summaries={})]
    [40, 80, 100]
    """
    if n < 1:
        raise errors.StepIntervalError("eval_policy.n", n)
    return lambda *, step, train_summaries: (
        step == max_step or (step >= min_step and step % n == 0)
    )


eval_every_n_steps_policy = every_n_steps_policy
"""The same, under the name that `weft.trainer` offers."""


class AtEndPolicy(config_lib.Configurable):
    """Policy that evaluates at the end of a run: its last step, the end of its data, an early stop.

    A run that a signal stops has not ended; it continues later.
    """

    class Config(config_lib.Configurable.Config):
        """Configures an AtEndPolicy; the policy `also` selects evaluations before the end."""

        also: config_lib.InstantiableConfig[EvalPolicy] | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        self._also: EvalPolicy | None = config_lib.maybe_instantiate(
            config.also
        )

    def __call__(self, *, step: int, train_summaries: dict[str, Any]) -> bool:
        return bool(
            self._also
            and self._also(step=step, train_summaries=train_summaries)
        )


class BestMetricEvalPolicy(BestMetric):
    """Policy that evaluates when the metric of an earlier evaler has its best value so far."""

    class Config(config_lib.Configurable.Config):
        """Configures a BestMetricEvalPolicy."""

        metric: config_lib.Required[EvalMetric] = config_lib.REQUIRED
        """The metric; its evaler must precede this one."""
        mode: str = "min"
        """"max" if larger is better, "min" if smaller is."""

    def __call__(self, *, step: int, train_summaries: dict[str, Any]) -> bool:
        return bool(self.improves(step, train_summaries.get("evalers", {})))


class EarlyStopping(BestMetric, Hook):
    """Hook that ends the run when a metric no longer improves; its state is saved with the run.

    >>> cfg = EarlyStopping.default_config().set(metric=EvalMetric("held_out", "loss"))
    >>> stopping = cfg.set(patience=1).instantiate()
    >>> [stopping(step=i, evaler_summaries={"held_out": {"loss": x}})
    ...  for i, x in enumerate([2.0, 1.0, 1.5, 1.5])]
    [False, False, False, True]
    """

    class Config(config_lib.Configurable.Config):
        """Configures an EarlyStopping."""

        metric: config_lib.Required[EvalMetric] = config_lib.REQUIRED
        """The metric to watch, such as `EvalMetric("held_out", "loss")`."""
        mode: str = "min"
        """"min" if smaller is better, "max" if larger is."""
        patience: int = 0
        """Consecutive evaluations without improvement that do not yet end the run."""
        min_delta: float = 0.0
        """Smallest change that counts as an improvement."""

    def __init__(self, config: Config):
        super().__init__(config, name="early_stopping")
        if config.patience < 0 or config.min_delta < 0:
            raise errors.EarlyStoppingError(
                f"early_stopping got patience={config.patience} and min_delta={config.min_delta:g};"
                " expected numbers that are not negative."
            )
        # `BestMetric` compares with `_min_delta`.
        self._patience = config.patience
        self._min_delta = config.min_delta
        self._count = 0  # of evaluations since the best

    @property
    def should_stop(self) -> bool:
        """True if the run should end."""
        return self._count > self._patience

    def check(self, evalers: Collection[str]) -> None:
        """Raises EarlyStoppingError if the run's evalers do not include that of the metric."""
        name = self.config.metric[0]
        if name not in evalers:
            raise errors.EarlyStoppingError(
                f"early_stopping uses the evaler {name!r}, which the run does not have; it has "
                f"{', '.join(evalers) or 'none'}. Set early_stopping.metric to one of these, or "
                "add it to evalers."
            )

    def on_start(
        self, trainer: RunningTrainer, resumed_from: int | None
    ) -> EndRun | None:
        return self._end_if_due()

    def on_eval(
        self, name: str, step: int, summaries: dict[str, Any]
    ) -> EndRun | None:
        self(step=step, evaler_summaries={name: summaries})
        return self._end_if_due()

    def _end_if_due(self) -> EndRun | None:
        if self.should_stop:
            return EndRun(EARLY_STOPPING)
        return None

    def __call__(self, *, step: int, evaler_summaries: dict[str, Any]) -> bool:
        """Records the metric after a step, if it was evaluated; returns whether to stop."""
        has_improved = self.improves(step, evaler_summaries)
        if has_improved:
            self._count = 0
        elif has_improved is not None:  # None without a new value
            self._count += 1
        return self.should_stop

    def get_state(self) -> dict[str, Any]:
        """Returns the best value so far and the count of evaluations since."""
        return {
            **super().get_state(),
            "count": self._count,
            "should_stop": self.should_stop,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a saved state; the patience of this config decides whether to stop."""
        check_json(state, {"best": (None, float), "count": int})
        super().set_state(state)
        self._count = state["count"]


class SpmdEvaler(hierarchy.Module):
    """Evaler of the trainer's model on the current mesh."""

    class Config(hierarchy.Module.Config):
        """Configures a SpmdEvaler."""

        input: config_lib.Required[Input.Config] = config_lib.REQUIRED
        """The data. Its dataset must be finite; its field `is_training`, if any, is set to False.
        The model is compiled for each shape of batch."""
        eval_policy: config_lib.InstantiableConfig[EvalPolicy] = (
            config_lib.config_for_function(every_n_steps_policy)
        )
        metric_calculator: BaseMetricCalculator.Config = (
            ModelSummaryAccumulator.default_config()
        )
        eval_dtype: DType | None = None
        """The dtype of the computation, unless the calculator has its own."""
        summary_writer: config_lib.InstantiableConfig = (
            SummaryWriter.default_config()
        )
        output_writer: BaseOutputWriter.Config | None = None
        """Receives the calculator's outputs for each batch."""
        trace_at_iters: Sequence[int] = []
        """Batches of each evaluation, counted from 0, to profile; traces are written below the
        directory of the summary writer."""

    def __init__(
        self,
        cfg: Config,
        *,
        parent: hierarchy.Module | None,
        model: hierarchy.BaseLayer,
        model_param_partition_specs: Nested[PartitionSpec],
    ):
        super().__init__(cfg, parent=parent)
        self._eval_policy: EvalPolicy = config_lib.maybe_instantiate(
            cfg.eval_policy
        )
        self._add_child(
            "input", config_lib.maybe_set_config(cfg.input, is_training=False)
        )
        calculator = cfg.metric_calculator
        if calculator.eval_dtype is None:
            calculator = calculator.clone(eval_dtype=cfg.eval_dtype)
        self._add_child(
            "metric_calculator",
            calculator,
            model=model,
            model_param_partition_specs=model_param_partition_specs,
        )
        self._add_child("summary_writer", cfg.summary_writer)
        if cfg.output_writer is not None:
            self._add_child("output_writer", cfg.output_writer)
        self._dispatch = jax.jit(self.input.dispatch_global_batch)

    @property
    def eval_policy(self) -> EvalPolicy:
        """The policy that decides after which steps to evaluate."""
        return self._eval_policy

    def eval_step(
        self,
        step: int,
        *,
        prng_key: Tensor,
        model_params: NestedTensor,
        return_aux: bool = False,
        train_summaries: dict[str, Any] | None = None,
        force_run: bool = False,
    ) -> tuple[Tensor, dict[str, Any] | None, list[Nested[Any]] | None]:
        """Evaluates if the policy wants this step. The mesh must be the current one.

        The metrics are a function of parameters, data and key.

        Args:
            return_aux: Whether to return the calculator's outputs for each batch.
            train_summaries: The training summaries of this step, for the policy.
            force_run: Whether to evaluate regardless of the policy.

        Returns a new key; the metrics by name, None without an evaluation; and the outputs or None.

        Raises InputDatasetError if the dataset has no batch.
        """
        if not force_run:
            is_due = self._eval_policy(
                step=step, train_summaries=train_summaries or {}
            )
            if not is_due:
                return prng_key, None, None
        next_key, prng_key = jax.random.split(prng_key)
        calculator: BaseMetricCalculator = self.metric_calculator
        state = calculator.init_state(
            prng_key=prng_key, model_params=model_params
        )
        outputs: list[Nested[Any]] = []
        # Outputs of all batches stay on the host: a calculator may need them at once.
        with contextlib.closing(self._global_batches()) as batches:
            for batch in batches:
                with self._traced(step, len(outputs)) as finish:
                    result = calculator.forward(
                        batch, model_params=model_params, state=state
                    )
                    state = finish(result["state"])
                outputs.append(result["output"])
                if "output_writer" in self.children:
                    self.output_writer.write(
                        input_batch=batch, output_batch=result["output"]
                    )
        if not outputs:
            raise errors.InputDatasetError(
                f"{self.path()}: the dataset has no batch to evaluate on; it needs at least as "
                "many examples as a batch has, or padding."
            )
        if "output_writer" in self.children:
            self.output_writer.flush()
        summaries = calculator.get_summaries(
            model_params=model_params, state=state, all_forward_outputs=outputs
        )
        self.summary_writer(step, summaries)
        self.summary_writer.flush()  # evaluations are rare, and their results looked for
        self._on_outputs(step, outputs)
        returned_outputs = outputs if return_aux else None
        return next_key, summaries, returned_outputs

    def _on_outputs(self, step: int, outputs: list[Any]) -> None:
        """Handles the calculator's outputs for each batch of an evaluation."""

    def _global_batches(self) -> Generator[NestedTensor]:
        input_: Input = self.input
        needs_dispatch = (
            input_.dispatcher is not None
            or input_.config.input_partitioner is not None
        )
        iterator: Any = iter(input_.dataset())
        with batches_until_stopped(
            iterator, input_.batches, self.path()
        ) as batches:
            for batch in batches:
                batch = host_to_global_device_array(
                    batch, partition=input_.partition_spec
                )
                if needs_dispatch:
                    batch = self._dispatch(batch)
                yield batch

    @contextlib.contextmanager
    def _traced(
        self, step: int, batch_index: int
    ) -> Iterator[Callable[[PyTree], PyTree]]:
        """Profiles the block if its batch is selected; yields a function that waits for results."""
        if batch_index not in self.config.trace_at_iters:
            yield lambda x: x
            return
        name = f"trace/step_{step:08d}_iter_{batch_index}"
        with jax.profiler.trace(
            os.path.join(self.summary_writer.config.dir, name)
        ):
            yield jax.block_until_ready


def run_evalers(
    evalers: Mapping[str, SpmdEvaler],
    *,
    step: int,
    prng_key: Tensor,
    model_params: NestedTensor,
    train_summaries: Mapping[str, Any] | None = None,
    hook: Hook,
    forced: Collection[str] | None = None,
    may_run: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Runs the evalers that are due, or only the `forced`; returns their summaries by name.

    The policy of each evaler receives the summaries of those before it. `may_run` is asked if one
    is due; none runs after it has returned False.
    """
    summaries_by_evaler: dict[str, Any] = {}
    policy_summaries = {
        **(train_summaries or {}),
        "evalers": summaries_by_evaler,
    }
    for name, evaler in evalers.items():
        if forced is None:
            is_due = evaler.eval_policy(
                step=step, train_summaries=policy_summaries
            )
        else:
            is_due = name in forced
        if not is_due:
            continue
        if not may_run():
            break  # the run has gone back: there is no state after this step
        _, summaries, _ = evaler.eval_step(
            step,
            prng_key=prng_key,
            model_params=model_params,
            train_summaries=policy_summaries,
            force_run=True,
        )
        if summaries is not None:
            summaries_by_evaler[name] = summaries
            hook.on_eval(name, step, summaries)
    return summaries_by_evaler


def names_to_return(
    evalers: Mapping[str, SpmdEvaler],
    names: bool | Collection[str] | None,
    trainer: str,
) -> list[str] | None:
    """Returns the names of the evalers whose summaries `SpmdTrainer.run` returns, if any."""
    if not names:
        return None
    if names is True:
        return list(evalers)
    for name in names:
        if name not in evalers:
            raise errors.ArgumentValueError(
                f"return_evaler_summaries names {name!r}, which is not one of the evalers of "
                f"{trainer}. {errors.did_you_mean(name, evalers)}"
            )
    return [name for name in evalers if name in names]


class EvaluationHook(Hook):
    """Hook that runs the evalers of a run when they are due.

    Attributes:
        summaries: of the evalers that have run since the last step, by name.
    """

    def __init__(
        self, trainer: RunningTrainer, evalers: Mapping[str, SpmdEvaler]
    ):
        self._trainer = trainer
        self._evalers = evalers
        self.summaries: dict[str, Any] = {}

    def after_step(
        self, step: int, outputs: dict[str, Any], batch: NestedTensor
    ) -> None:
        # A bad step is noticed before it is evaluated, and may take the run back.
        self.summaries = self._run(
            train_summaries=outputs["summaries"], may_run=self._trainer.settle
        )

    def run_at_end(self, names: Collection[str]) -> None:
        """Runs the evalers of these names, and those for the end, if they have not run yet."""
        due_names = due_at_end(self._evalers).union(names)
        self.summaries |= self._run(forced=due_names - self.summaries.keys())

    def _run(
        self,
        *,
        train_summaries: dict[str, Any] | None = None,
        forced: Collection[str] | None = None,
        may_run: Callable[[], bool] = lambda: True,
    ) -> dict[str, Any]:
        trainer = self._trainer
        return run_evalers(
            self._evalers,
            step=trainer.step,
            # A key of its own: whether a step is evaluated does not change the next one.
            prng_key=jax.random.fold_in(trainer.trainer_state.prng_key, 0),
            model_params=trainer.model_params_for_eval(),
            train_summaries=train_summaries,
            hook=trainer.hooks,
            forced=forced,
            may_run=may_run,
        )


def due_at_end(evalers: Mapping[str, SpmdEvaler]) -> set[str]:
    """Returns the names of the evalers whose policy is an `AtEndPolicy`."""
    return {
        name
        for name, evaler in evalers.items()
        if isinstance(evaler.eval_policy, AtEndPolicy)
    }
