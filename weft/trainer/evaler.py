"""Evaluation of a model on its own data, at the steps that a policy selects.

The metric calculator computes the metrics; the evaler provides batches and writes the summaries.
"""

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from weft.config import (
    REQUIRED,
    InstantiableConfig,
    Required,
    config_class,
    config_for_function,
    maybe_instantiate,
)
from weft.errors import InputDatasetError
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.module import Module
from weft.input import Input, host_to_global_device_array
from weft.trainer.eval_policy import (
    AtEndPolicy,
    BestMetricEvalPolicy,
    EvalPolicy,
    every_n_steps_policy,
)
from weft.trainer.interruption import batches_until_stopped
from weft.trainer.metric_calculator import (
    BaseMetricCalculator,
    CompositeMetricCalculator,
    GlobalMetricCalculator,
    ModelSummaryAccumulator,
    PredictionOutputs,
)
from weft.trainer.output_writer import BaseOutputWriter
from weft.trainer.summary_writer import SummaryWriter
from weft.typing import DType, Nested, NestedTensor, Tensor

__all__ = [
    "AtEndPolicy",
    "BaseMetricCalculator",
    "BaseOutputWriter",
    "BestMetricEvalPolicy",
    "CompositeMetricCalculator",
    "EvalPolicy",
    "GlobalMetricCalculator",
    "ModelSummaryAccumulator",
    "PredictionOutputs",
    "SpmdEvaler",
    "every_n_steps_policy",
]


class SpmdEvaler(Module):
    """Evaler of the trainer's model on the current mesh."""

    @config_class
    class Config(Module.Config):
        """Configures a SpmdEvaler.

        Attributes:
            input: The data. Its dataset must be finite. The model is compiled for each shape of
                batch.
            eval_policy: Decides after which steps to evaluate.
            metric_calculator: Computes the metrics.
            eval_dtype: The dtype of the computation, unless the calculator has its own.
            summary_writer: Writes the metrics.
            output_writer: Receives the calculator's outputs for each batch.
            trace_at_iters: Batches of each evaluation, counted from 0, to profile; traces are
                written below the directory of the summary writer.
        """

        input: Required[Input.Config] = REQUIRED
        eval_policy: InstantiableConfig[EvalPolicy] = config_for_function(every_n_steps_policy)
        metric_calculator: BaseMetricCalculator.Config = ModelSummaryAccumulator.default_config()
        eval_dtype: DType | None = None
        summary_writer: InstantiableConfig = SummaryWriter.default_config()
        output_writer: BaseOutputWriter.Config | None = None
        trace_at_iters: Sequence[int] = []

    def __init__(
        self,
        cfg: Config,
        *,
        parent: Module | None,
        model: BaseLayer,
        model_param_partition_specs: Nested[PartitionSpec],
    ):
        super().__init__(cfg, parent=parent)
        self._eval_policy: EvalPolicy = maybe_instantiate(cfg.eval_policy)
        self._add_child("input", cfg.input)
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
            step: The step of the parameters.
            prng_key: For the evaluation.
            model_params: The parameters.
            return_aux: Whether to return the calculator's outputs for each batch.
            train_summaries: The training summaries of this step, for the policy.
            force_run: Whether to evaluate regardless of the policy.

        Returns:
            A new key; the metrics by name, None without an evaluation; and the outputs or None.

        Raises:
            InputDatasetError: If the dataset has no batch.
        """
        wanted = force_run or self._eval_policy(step=step, train_summaries=train_summaries or {})
        if not wanted:
            return prng_key, None, None
        next_key, prng_key = jax.random.split(prng_key)
        calculator: BaseMetricCalculator = self.metric_calculator
        state = calculator.init_state(prng_key=prng_key, model_params=model_params)
        outputs: list[Nested[Any]] = []
        with contextlib.closing(self._global_batches()) as batches:
            for batch in batches:
                with self._traced(step, len(outputs)) as finish:
                    result = calculator.forward(batch, model_params=model_params, state=state)
                    state = finish(result["state"])
                outputs.append(result["output"])
                if "output_writer" in self.children:
                    self.output_writer.write(input_batch=batch, output_batch=result["output"])
        if not outputs:
            raise InputDatasetError(
                f"{self.path()}: the dataset has no batch to evaluate on; it needs at least as "
                "many examples as a batch has, or padding."
            )
        if "output_writer" in self.children:
            self.output_writer.flush()
        summaries = calculator.get_summaries(
            model_params=model_params, state=state, all_forward_outputs=outputs
        )
        self.summary_writer(step, summaries)
        self.summary_writer.flush()
        return next_key, summaries, outputs if return_aux else None

    def _global_batches(self) -> Generator[NestedTensor]:
        """Yields the batches as global arrays on the mesh."""
        input_: Input = self.input
        dispatched = input_.dispatcher is not None or input_.config.input_partitioner is not None
        iterator: Any = iter(input_.dataset())
        with batches_until_stopped(iterator, input_.batches, self.path()) as batches:
            for batch in batches:
                batch = host_to_global_device_array(batch, partition=input_.partition_spec)
                yield self._dispatch(batch) if dispatched else batch

    @contextlib.contextmanager
    def _traced(self, step: int, batch: int) -> Iterator[Callable[[Any], Any]]:
        """Profiles the block if its batch is selected; yields a function that waits for results."""
        if batch not in self.config.trace_at_iters:
            yield lambda x: x
            return
        name = f"trace/step_{step:08d}_iter_{batch}"
        with jax.profiler.trace(os.path.join(self.summary_writer.config.dir, name)):
            yield jax.block_until_ready
