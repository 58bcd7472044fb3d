"""Inference pipelines: run a method of a trained model on all of an input, and write the results.

cfg = InferencePipeline.default_config().set(
    name="pipeline",
    input=input_cfg,
    runner=InferenceRunner.config_from_trainer(trainer_cfg),
    model_method="predict",
)
cfg.output_writer.sink.output_path = "out/record-{process_index:05d}-of-{process_count:05d}.jsonl"
cfg.instantiate(parent=None).run()
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from weft import config, errors
from weft import input as input_lib
from weft.core.flat_dict import flatten_dict, unflatten_dict
from weft.core.spmd import axes_of
from weft.distributed.preemption import batches_until_stopped
from weft.hierarchy.module import Module
from weft.inference.output import BaseOutputWriter, OutputRecordWriter
from weft.inference.runner import InferenceRunner
from weft.input import dispatch


def pop_string_tensors(
    input_batch: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a batch into numbers, which devices support, and texts.

    >>> pop_string_tensors({"x": np.ones(1), "of": {"text": np.array(["a"])}})
    ({'x': array([1.])}, {'of': {'text': array(['a'], dtype='<U1')}})
    """
    numbers = {}
    strings = {}
    for path, x in flatten_dict(input_batch).items():
        is_string = np.asarray(x).dtype.kind in "OSU"
        (strings if is_string else numbers)[path] = x
    return unflatten_dict(numbers), unflatten_dict(strings)


def merge_with_string_tensors(
    batch: dict[str, Any], string_tensors: dict[str, Any]
) -> dict[str, Any]:
    """Inverts `pop_string_tensors`."""
    return unflatten_dict(
        {**flatten_dict(batch), **flatten_dict(string_tensors)}
    )


class InferencePipeline(Module):
    """Runs a method of a model on each batch of an input, and writes inputs and outputs.

    All processes must read equally many batches of equally many rows, which the mesh divides: pad
    the input, and leave padding out by the writer's `converter`.
    """

    class Config(Module.Config):
        """Configures an InferencePipeline."""

        input: config.Required[input_lib.Input.Config] = config.REQUIRED
        """The data; finite. Its texts are not passed to the model, but written. Its field
        `is_training`, if any, is set to False."""
        runner: config.Required[InferenceRunner.Config] = config.REQUIRED
        model_method: config.Required[str] = config.REQUIRED
        """Name of the method; it is called as `method(input_batch=batch)`."""
        output_writer: BaseOutputWriter.Config = (
            OutputRecordWriter.default_config()
        )

    def __init__(self, cfg: Config, *, parent: Module | None, **kwargs: Any):
        """Creates the pipeline; further arguments are those of the runner, such as `devices`.

        Raises InferenceError if the input and the runner shard the rows of a batch differently.
        """
        super().__init__(cfg, parent=parent)
        self._add_child("runner", cfg.runner, **kwargs)
        self._add_child("output_writer", cfg.output_writer)
        with self.runner.mesh():
            self._add_child(
                "input", config.maybe_set_config(cfg.input, is_training=False)
            )
            self._check_rows()

    def _check_rows(self) -> None:
        partition_type = self.runner.config.input_batch_partition_spec
        input_axes = _axes_of_rows(self.input.partition_spec)
        runner_axes = _axes_of_rows(
            partition_type.partition_spec(jax.sharding.get_mesh())
        )
        if input_axes != runner_axes:
            raise errors.InferenceError(
                f"{self.path()}: the input shards the rows of a batch over {input_axes}, the "
                f"runner, by input_batch_partition_spec={partition_type}, over {runner_axes}. Set "
                "one of them to that of the other."
            )

    def run(self, **kwargs: Any) -> None:
        """Runs the method on all batches and writes the results.

        For `kwargs` and errors see `InferenceRunner.create_method_runner`.
        """
        method = self.runner.create_method_runner(
            method=self.config.model_method, **kwargs
        )
        with self.runner.mesh():
            dataset = iter(self.input.dataset())
            with batches_until_stopped(
                dataset, self.input.batches, self.path()
            ) as batches:
                for batch in batches:
                    numbers, host_arrays = pop_string_tensors(batch)
                    if dispatch.LOGICAL_ROW_KEY in numbers:
                        rows = numbers.pop(dispatch.LOGICAL_ROW_KEY)
                        host_arrays[dispatch.LOGICAL_ROW_KEY] = rows
                    result = method(numbers)
                    self.output_writer.write(
                        input_batch=merge_with_string_tensors(
                            result.input_batch, host_arrays
                        ),
                        output_batch=result.output_batch,
                    )
        self.output_writer.flush()


def _axes_of_rows(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes over which the first axis of arrays is sharded."""
    return axes_of(spec[0] if len(spec) else None)
