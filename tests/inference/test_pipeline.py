"""A linear model with known parameters, saved to disk, on numbered records of a file."""

import json
import os
import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft.config import config_for_function
from weft.errors import FileRefusedError, InferenceError
from weft.hierarchy.base_layer import BaseModel, ParameterSpec
from weft.inference.output import JsonlExampleRecordSink
from weft.inference.pipeline import (
    InferencePipeline,
    merge_with_string_tensors,
    pop_string_tensors,
)
from weft.inference.runner import DataPartitionType, InferenceRunner
from weft.input.dispatch import InputDispatcher, SpmdInputDispatcher
from weft.input.grain import Input, pad_for_evaluation, per_feed_batch, shard_dataset
from weft.launch.local import LocalJob
from weft.trainer.checkpointer import Checkpointer
from weft.trainer.learner import Learner
from weft.trainer.trainer import SpmdTrainer

W = np.array([[1.0, -2.0], [0.5, 4.0]], np.float32)
NUM = 16
WORDS = ["één", "two", "3"]
SHARD = "record-{process_index:05d}-of-{process_count:05d}.jsonl"


class Predictor(BaseModel):
    def _create_layer_parameter_specs(self):
        return {"weight": ParameterSpec((2, 2), mesh_axes=(None, "model"))}

    def forward(self, input_batch):
        raise NotImplementedError

    def predict(self, input_batch, *, factor=1.0):
        assert sorted(input_batch) == ["x"]
        y = factor * input_batch["x"] @ self.parameters["weight"]
        return {"y": y, "best": jnp.argmax(y, axis=1)}

    def total(self, input_batch):
        return {"total": jnp.sum(input_batch["x"])}


def records_of(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def source(path, size):
    def build(dispatch_config):
        ds = grain.MapDataset.source(records_of(path)).map(
            lambda record: {"x": np.array(record["x"], np.float32), "of": {"text": record["text"]}}
        )
        ds = pad_for_evaluation(ds, per_feed_batch_size=size)
        ds = shard_dataset(ds, dispatch_config)
        return per_feed_batch(ds, global_batch_size=size, dispatch_config=dispatch_config)

    return build


def pipeline_config(directory, *, axes=("data", "model"), shape=(4, 2), out=SHARD, size=8):
    trainer_cfg = SpmdTrainer.default_config().set(
        dir=str(directory),
        model=Predictor.default_config(),
        learner=Learner.default_config(),
        mesh_shape=shape,
        mesh_axis_names=axes,
    )
    read = config_for_function(source).set(path=str(directory / "input.jsonl"), size=size)
    cfg = InferencePipeline.default_config().set(
        name="pipeline",
        input=Input.default_config().set(source=read),
        runner=InferenceRunner.config_from_trainer(trainer_cfg),
        model_method="predict",
    )
    cfg.output_writer.sink.output_path = str(directory / out)
    return cfg


def is_numbered(i):
    return {"x": [float(i), 1.0], "text": f"{WORDS[i % 3]} {i}"}


@pytest.fixture
def directory(tmp_path):
    cfg = Checkpointer.default_config().set(name="checkpointer", dir=str(tmp_path / "checkpoints"))
    state = {"prng_key": jax.random.key(0), "model": {"weight": jnp.asarray(W)}, "learner": {}}
    with cfg.instantiate(parent=None) as checkpointer:
        checkpointer.save(step=7, state=state)
        checkpointer.wait_until_finished()
    lines = [json.dumps(is_numbered(i)) + "\n" for i in range(NUM)]
    (tmp_path / "input.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def pipeline_of(cfg):
    count = int(np.prod(cfg.runner.mesh_shape))
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices; WEFT_TEST_DEVICES gives {jax.device_count()}")
    return cfg.instantiate(parent=None, devices=jax.devices()[:count])


def expected(i, factor=1.0):
    # [i, 1] times W.
    y = [factor * (i + 0.5), factor * (-2.0 * i + 4.0)]
    given = is_numbered(i)
    return {
        "input": {"x": given["x"], "of": {"text": given["text"]}},
        "output": {"y": y, "best": int(y[1] > y[0])},
    }


def test_inputs_and_outputs_of_all_records_are_written(directory):
    pipeline = pipeline_of(pipeline_config(directory))
    pipeline.run(factor=2.0)
    assert records_of(directory / "record-00000-of-00001.jsonl") == [
        expected(i, 2.0) for i in range(NUM)
    ]
    # Running it again replaces the file.
    pipeline.run()
    assert records_of(directory / "record-00000-of-00001.jsonl")[3] == expected(3)
    assert len(list(directory.glob("*record*"))) == 1


def without_padding(*, input_batch, output_batch):
    kept = input_batch["of"]["text"] != ""
    return {"text": input_batch["of"]["text"][kept], "best": output_batch["best"][kept]}


def test_converter_leaves_padding_out(directory):
    cfg = pipeline_config(directory, size=24)
    cfg.output_writer.converter = without_padding
    pipeline_of(cfg).run()
    assert records_of(directory / "record-00000-of-00001.jsonl") == [
        {"text": is_numbered(i)["text"], "best": int(i < 2)} for i in range(NUM)
    ]


def test_rows_of_the_dispatcher_are_left_out(directory):
    cfg = pipeline_config(directory, size=4)
    cfg.input.input_dispatcher = InputDispatcher.default_config().set(
        global_logical_batch_size=4, global_physical_batch_size=8
    )
    pipeline_of(cfg).run()
    assert records_of(directory / "record-00000-of-00001.jsonl") == list(map(expected, range(NUM)))


def test_file_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "new" / "out.jsonl"
    cfg = JsonlExampleRecordSink.default_config().set(name="sink", output_path=str(path))
    sink = cfg.instantiate(parent=None)
    record = {"x": np.array([[1, np.nan]], np.float32), "b": np.bool_(True), "s": b"\xc3\xa9"}
    sink.write({**record, "t": np.str_("é"), "half": jnp.ones((), jnp.bfloat16)})
    assert not path.exists()
    sink.flush()
    line = path.read_text(encoding="utf-8")
    assert line == '{"b": true, "half": 1.0, "s": "é", "t": "é", "x": [[1.0, "nan"]]}\n'
    # A process without records also has a file.
    sink.flush()
    assert path.read_text(encoding="utf-8") == "" and len(list(path.parent.iterdir())) == 1


def test_strings_are_split_off_and_merged():
    batch = {"x": np.ones(2), "of": {"text": np.array(["a", "b"]), "n": np.arange(2)}}
    numbers, strings = pop_string_tensors(batch)
    assert sorted(numbers) == ["of", "x"] and list(numbers["of"]) == ["n"]
    assert list(strings) == ["of"] and list(strings["of"]) == ["text"]
    merged = merge_with_string_tensors(numbers, strings)
    jax.tree.map(np.testing.assert_array_equal, merged, batch)


def test_unfinished_output_is_not_written_through_a_link(tmp_path):
    (tmp_path / "private").write_text("mine", encoding="utf-8")
    (tmp_path / ".out.jsonl.unfinished").symlink_to(tmp_path / "private")
    cfg = JsonlExampleRecordSink.default_config().set(
        name="sink", output_path=f"{tmp_path}/out.jsonl"
    )
    sink = cfg.instantiate(parent=None)
    with pytest.raises(FileRefusedError, match=r"\.out\.jsonl\.unfinished' is a symbolic link"):
        sink.write({"a": 1})
    assert (tmp_path / "private").read_text(encoding="utf-8") == "mine"
    # One of a killed process is written again.
    (tmp_path / ".out.jsonl.unfinished").unlink()
    (tmp_path / ".out.jsonl.unfinished").write_text("left over, and longer", encoding="utf-8")
    sink.write({"a": 1})
    sink.flush()
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == '{"a": 1}\n'


def test_input_and_runner_shard_rows_alike(directory):
    cfg = pipeline_config(directory)
    cfg.input.partition_spec = PartitionSpec("data")
    message = r"pipeline: the input shards .* over \('data',\), the runner, by .*\.FULL"
    with pytest.raises(InferenceError, match=message):
        pipeline_of(cfg)
    cfg.runner.input_batch_partition_spec = DataPartitionType.BATCH
    pipeline_of(cfg).run()
    assert records_of(directory / "record-00000-of-00001.jsonl")[5] == expected(5)


PROGRAM = """
from pathlib import Path
from weft.launch.distributed import joined_processes
with joined_processes() as place:
    from tests.inference.test_pipeline import run_in_processes
    run_in_processes(Path(DIRECTORY))
"""


def run_in_processes(directory):
    cfg = pipeline_config(directory, shape=(2, 2), out="own-" + SHARD)
    cfg.instantiate(parent=None).run()
    # The processes are the axis "model", so both hold all rows.
    cfg = pipeline_config(directory, axes=("model", "data"), shape=(2, 2), out="same-" + SHARD)
    cfg.runner.input_batch_partition_spec = DataPartitionType.BATCH
    cfg.input.input_dispatcher = SpmdInputDispatcher.default_config().set(
        global_logical_batch_size=8, partition_spec=PartitionSpec("data")
    )
    cfg.instantiate(parent=None).run()


@pytest.mark.long
def test_each_process_writes_its_rows(directory):
    cfg = LocalJob.default_config().set(
        name="job",
        command=[sys.executable, "-c", PROGRAM.replace("DIRECTORY", repr(str(directory)))],
        num_processes=2,
        env={
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
    )
    assert cfg.instantiate().run() == 0

    def parts(name):
        return [records_of(directory / f"{name}-record-0000{i}-of-00002.jsonl") for i in range(2)]

    first, second = parts("own")
    assert len(first) == len(second) == NUM // 2
    both = sorted(first + second, key=lambda record: record["input"]["x"])
    assert both == list(map(expected, range(NUM)))
    assert parts("same") == [list(map(expected, range(NUM))), []]


def test_arrays_without_rows_are_refused(directory):
    pipeline = pipeline_of(pipeline_config(directory).set(model_method="total"))
    with pytest.raises(InferenceError, match=r"equally many rows.*'output/total': \(\)\}; set a"):
        pipeline.run()
    assert not (directory / "record-00000-of-00001.jsonl").exists()


def test_output_paths_of_processes_differ(monkeypatch):
    sink = JsonlExampleRecordSink.default_config().set(name="sink")
    with pytest.raises(InferenceError, match=r"output_path='\{step\}' is not a format of pr"):
        sink.clone(output_path="{step}").instantiate(parent=None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InferenceError, match="sink: all 2 processes would write to output_path"):
        sink.clone(output_path="out.jsonl").instantiate(parent=None)
