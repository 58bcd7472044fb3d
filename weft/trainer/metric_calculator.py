"""Metric calculators, which an evaler uses to turn batches into metrics.

A calculator runs the model on each batch (`forward`, compiled once), passes a state with the PRNG
key from batch to batch, and computes the summaries at the end. Evaluations share no state.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import jax
import numpy as np

from weft import config, errors, hierarchy
from weft.distributed.preemption import InterruptibleJit
from weft.hierarchy import context
from weft.hierarchy.module import Module, check_method, functional
from weft.input.dispatch import current_mesh
from weft.trainer.compilation import count, options_for_evaluation
from weft.trainer.model import cast_floats, with_returned_loss
from weft.typing import DType, Nested, NestedTensor, PyTree, Tensor


class BaseMetricCalculator(Module):
    """Base class of metric calculators.

    Args:
        model: The model to evaluate; not a child, since it belongs to the trainer.
        model_param_partition_specs: Partition specs of its parameters, nested like them; None to
            leave their layout as it is.
    """

    class Config(Module.Config):
        """Configures a BaseMetricCalculator."""

        eval_dtype: DType | None = None
        """The dtype in which the model computes; None for that of its parameters."""
        prefix: str | None = None
        """Prepended to metric names, as `prefix/name`."""

    _run: Callable[[NestedTensor, Tensor, NestedTensor], tuple[Tensor, Any]]

    def __init__(
        self,
        cfg: Config,
        *,
        parent: Module | None,
        model: hierarchy.BaseLayer,
        model_param_partition_specs: Nested[jax.sharding.PartitionSpec]
        | None = None,
    ):
        super().__init__(cfg, parent=parent)
        self._model = model
        self._model_param_partition_specs = model_param_partition_specs

    def init_state(
        self, *, prng_key: Tensor, model_params: NestedTensor
    ) -> dict[str, Any]:
        """Returns the state before the first batch; by default the key, as "prng_key"."""
        return {"prng_key": prng_key}

    def forward(
        self,
        input_batch: NestedTensor,
        *,
        model_params: NestedTensor,
        state: dict[str, Any],
    ) -> dict[str, Any]:
        """Runs the model on a global batch, with the state of the previous one.

        By default this calls `self._run`, which a subclass sets to a result of `_jit_of_model`.

        Returns a dict of "state", for the next batch, and "output", for `get_summaries`.
        """
        prng_key, outputs = self._run(
            model_params, state["prng_key"], input_batch
        )
        # The host has room for the outputs of all batches.
        return {
            "state": {"prng_key": prng_key},
            "output": jax.device_get(outputs),
        }

    def get_summaries(
        self,
        *,
        model_params: NestedTensor,
        state: dict[str, Any],
        all_forward_outputs: list[Any],
    ) -> dict[str, Any]:
        """Computes the metrics from the last batch's state and the "output" of each batch."""
        raise NotImplementedError(type(self))

    def formatted_metric_name(self, metric_name: str) -> str:
        """Returns the name of a metric with the prefix, if any."""
        prefix = self.config.prefix
        if not prefix:
            return metric_name
        return f"{prefix}/{metric_name}"

    def _with_prefix(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {
            self.formatted_metric_name(name): value
            for name, value in metrics.items()
        }

    def _jit_of_model(
        self,
        method: str,
        *,
        inputs: Callable[
            [NestedTensor], tuple[PyTree, ...] | dict[str, PyTree]
        ],
        outputs: Callable[
            [NestedTensor, PyTree, context.OutputCollection], PyTree
        ],
    ) -> Callable[[NestedTensor, Tensor, NestedTensor], tuple[Tensor, PyTree]]:
        """Returns a method of the model, compiled at its first call.

        `inputs` maps a batch to the method's arguments, a tuple or a dict; `outputs` maps the
        batch, the method's result and its side outputs to the outputs. The result takes parameters,
        PRNG key and batch, and returns the key for the next batch and the outputs, replicated so
        that each process can read them.
        """
        # Checked now rather than at the first evaluation, which may be hours into training.
        check_method(self, self._model, method, errors.MetricCalculatorError)

        def eval_step(
            params: NestedTensor, prng_key: Tensor, batch: NestedTensor
        ) -> tuple[Tensor, PyTree]:
            next_key, key = jax.random.split(prng_key)
            specs = self._model_param_partition_specs
            if specs is not None:
                params = jax.tree.map(
                    jax.lax.with_sharding_constraint, params, specs
                )
            params, batch = cast_floats((params, batch), self.config.eval_dtype)
            result, collection = functional(
                self._model,
                prng_key=key,
                state=params,
                inputs=inputs(batch),
                method=method,
                is_training=False,
                drop_output_collections=(),
            )
            return next_key, outputs(batch, result, collection)

        @functools.cache
        def compiled_for(
            mesh: jax.sharding.Mesh, num_parameters: int
        ) -> InterruptibleJit:
            platform = mesh.devices.flat[0].platform
            jitted = jax.jit(
                eval_step,
                out_shardings=jax.sharding.NamedSharding(
                    mesh, jax.sharding.PartitionSpec()
                ),
                compiler_options=options_for_evaluation(
                    platform, num_parameters
                ),
            )
            return InterruptibleJit(jitted, self.path())

        def run(
            params: NestedTensor, prng_key: Tensor, batch: NestedTensor
        ) -> tuple[Tensor, PyTree]:
            compiled = compiled_for(current_mesh(), count(params))
            return compiled(params, prng_key, batch)

        return run


class ModelSummaryAccumulator(BaseMetricCalculator):
    """Metric calculator that accumulates the summaries of the model itself."""

    class Config(BaseMetricCalculator.Config):
        """Configures a ModelSummaryAccumulator."""

        model_method: str = "forward"
        """The method of the model to call with each batch."""
        model_method_kwargs: dict[str, Any] = {}
        """Its other arguments."""
        metric_accumulator: config.InstantiableConfig = (
            hierarchy.MetricAccumulator.default_config()
        )
        filter_module_outputs: config.ConfigOr[Callable[[str], bool]] | None = (
            None
        )
        """Returns whether to keep the module output of a path, such as "decoder/x", in the evaler's
        outputs of each batch; None to keep none."""

    def __init__(self, cfg: Config, *, parent: Module | None, **kwargs: Any):
        super().__init__(cfg, parent=parent, **kwargs)
        self._accumulator: hierarchy.MetricAccumulator = (
            cfg.metric_accumulator.instantiate()
        )
        keep_output = config.maybe_instantiate(cfg.filter_module_outputs)
        if keep_output is None:
            keep_output = lambda path: False  # noqa: E731

        def inputs(batch: NestedTensor) -> dict[str, PyTree]:
            return {"input_batch": batch, **cfg.model_method_kwargs}

        def outputs(
            batch: NestedTensor,
            result: PyTree,
            collection: context.OutputCollection,
        ) -> tuple[dict[str, Any], PyTree]:
            summaries = with_returned_loss(collection.summaries, result)
            return summaries, context.filter_outputs(
                collection.module_outputs, keep_output
            )

        self._run = self._jit_of_model(
            cfg.model_method, inputs=inputs, outputs=outputs
        )

    def init_state(
        self, *, prng_key: Tensor, model_params: NestedTensor
    ) -> dict[str, Any]:
        self._accumulator = self.config.metric_accumulator.instantiate()
        return {"prng_key": prng_key}

    def forward(
        self,
        input_batch: NestedTensor,
        *,
        model_params: NestedTensor,
        state: dict[str, Any],
    ) -> dict[str, Any]:
        next_key, outputs = self._run(
            model_params, state["prng_key"], input_batch
        )
        summaries, module_outputs = outputs
        self._accumulator.update(summaries)
        return {
            "state": {"prng_key": next_key},
            "output": jax.device_get(module_outputs),
        }

    def get_summaries(
        self,
        *,
        model_params: NestedTensor,
        state: dict[str, Any],
        all_forward_outputs: list[Any],
    ) -> dict[str, Any]:
        return self._with_prefix(self._accumulator.summaries())


class PredictionOutputs(NamedTuple):
    """Batch with the model's predictions."""

    input_batch: Nested[Any]
    predict_outputs: Nested[Any]


class GlobalMetricCalculator(BaseMetricCalculator):
    """Base class of calculators for metrics that need all examples at once, such as AUC or BLEU.

    A subclass defines `_calculate_metrics`. Batches and predictions are gathered on each host.
    """

    class Config(BaseMetricCalculator.Config):
        """Configures a GlobalMetricCalculator."""

        predict_method: str = "predict"
        """The method of the model to call with each batch."""
        predict_input_field: str | None = None
        """The field of the batch to pass; None for the whole batch."""

    def __init__(self, cfg: Config, *, parent: Module | None, **kwargs: Any):
        super().__init__(cfg, parent=parent, **kwargs)
        self._run = self._jit_of_model(
            cfg.predict_method,
            inputs=lambda batch: (self._predict_input(batch),),
            outputs=lambda batch, result, collection: PredictionOutputs(
                batch, result
            ),
        )

    def _predict_input(self, input_batch: NestedTensor) -> NestedTensor:
        field = self.config.predict_input_field
        if field is None:
            return input_batch
        if field not in input_batch:
            raise errors.MetricCalculatorError(
                f"{self.path()}: the batch has no field predict_input_field={field!r}. "
                f"{errors.did_you_mean(field, input_batch)}"
            )
        return input_batch[field]  # pyright: ignore[reportIndexIssue]

    def _calculate_metrics(self, outputs: PredictionOutputs) -> dict[str, Any]:
        """Computes summaries by name from the rows of all batches, concatenated, as host arrays."""
        raise NotImplementedError(type(self))

    def get_summaries(
        self,
        *,
        model_params: NestedTensor,
        state: dict[str, Any],
        all_forward_outputs: list[Any],
    ) -> dict[str, Any]:
        outputs = jax.tree.map(
            lambda *parts: np.concatenate(parts), *all_forward_outputs
        )
        return self._with_prefix(self._calculate_metrics(outputs))


class _Dependency(NamedTuple):
    src: str
    dst: str
    dst_key: str | None = None


class CompositeMetricCalculator(BaseMetricCalculator):
    """Metric calculator that runs several calculators on the same batches."""

    class Dependency(_Dependency):
        """Dependency of one calculator on the output of another for each batch.

        Attributes:
            src: Name of the calculator that produces the output.
            dst: Name of the calculator that consumes it, or a regular expression that matches the
                names of several.
            dst_key: The field of the batch that holds the output for `dst`, which the batch does
                not have itself; None for `src`.
        """

        __slots__ = ()

        def __new__(
            cls, src: str, dst: str, dst_key: str | None = None, **other: object
        ) -> Any:
            if other:
                raise errors.MetricCalculatorError(
                    f"a Dependency has no {', '.join(map(repr, other))}; it has src, dst and "
                    "dst_key, which is the field of the batch for the output. Write dst_key=...."
                )
            return super().__new__(cls, src, dst, dst_key)

    class Config(BaseMetricCalculator.Config):
        """Configures a CompositeMetricCalculator."""

        metric_calculators: config.Required[
            Mapping[str, BaseMetricCalculator.Config]
        ] = config.REQUIRED
        """The calculators by name, which comes before the names of their metrics, as in
        `name/accuracy`."""
        dependencies: (
            Sequence["CompositeMetricCalculator.Dependency"] | None
        ) = None
        """Calculators that need the outputs of others."""

    def __init__(self, cfg: Config, *, parent: Module | None, **kwargs: Any):
        super().__init__(cfg, parent=parent, **kwargs)
        self._calculators: dict[str, BaseMetricCalculator] = {}
        for name, child in cfg.metric_calculators.items():
            if child.eval_dtype is None:
                child = child.clone(eval_dtype=cfg.eval_dtype)
            self._calculators[name] = self._add_child(name, child, **kwargs)  # pyright: ignore[reportArgumentType]
        self._order = self._sources_first()

    def _sources_first(self) -> list[str]:
        """Returns the names of the calculators, each after those whose outputs it needs."""
        sources: dict[str, list[str]] = {name: [] for name in self._calculators}
        for dependency in self.config.dependencies or ():
            if dependency.src not in sources:
                raise self._unknown_calculator_error(dependency, dependency.src)
            consumers = [
                name for name in sources if re.fullmatch(dependency.dst, name)
            ]
            if not consumers:
                raise self._unknown_calculator_error(dependency, dependency.dst)
            for name in consumers:
                sources[name].append(dependency.src)
        try:
            return list(TopologicalSorter(sources).static_order())
        except CycleError as error:
            raise errors.MetricCalculatorError(
                f"{self.path()}: the dependencies form a cycle: "
                f"{' -> '.join(error.args[1])}. Remove one of them."
            ) from None

    def _unknown_calculator_error(
        self, dependency: _Dependency, name: str
    ) -> errors.MetricCalculatorError:
        return errors.MetricCalculatorError(
            f"{self.path()}: the dependency {dependency} names {name!r}, which is not one of the "
            f"metric_calculators. {errors.did_you_mean(name, self._calculators)}"
        )

    def init_state(
        self, *, prng_key: Tensor, model_params: NestedTensor
    ) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, calculator in self._calculators.items():
            key = context.fold_in_name(prng_key, name)
            states[name] = calculator.init_state(
                prng_key=key, model_params=model_params
            )
        return states

    def forward(
        self,
        input_batch: NestedTensor,
        *,
        model_params: NestedTensor,
        state: dict[str, Any],
    ) -> dict[str, Any]:
        states: dict[str, Any] = {}
        outputs: dict[str, Any] = {}
        for name in self._order:
            source_outputs: dict[str, Any] = {}  # by field of the batch
            for dependency in self.config.dependencies or ():
                if re.fullmatch(dependency.dst, name):
                    field = dependency.dst_key or dependency.src
                    source_outputs[field] = outputs[dependency.src]
            batch = dict(input_batch)
            replaced_fields = sorted(source_outputs.keys() & batch.keys())
            if replaced_fields:
                raise errors.MetricCalculatorError(
                    f"{self.path()}: a dependency of {name!r} would replace {replaced_fields} of "
                    "the batch by the output of another calculator; give it another dst_key."
                )
            result = self._calculators[name].forward(
                {**batch, **source_outputs},
                model_params=model_params,
                state=state[name],
            )
            states[name] = result["state"]
            outputs[name] = result["output"]
        return {"state": states, "output": outputs}

    def get_summaries(
        self,
        *,
        model_params: NestedTensor,
        state: dict[str, Any],
        all_forward_outputs: list[Any],
    ) -> dict[str, Any]:
        all_summaries: dict[str, Any] = {}
        for name, calculator in self._calculators.items():
            summaries = calculator.get_summaries(
                model_params=model_params,
                state=state[name],
                all_forward_outputs=[
                    outputs[name] for outputs in all_forward_outputs
                ],
            )
            for metric_name, value in summaries.items():
                all_summaries[f"{name}/{metric_name}"] = value
        return self._with_prefix(all_summaries)
