"""Output writers: records of the inputs and outputs of a model, in files.

    batch of inputs and outputs ── rows of this process ── converter ── records ── sink

A record is a nested dict of one example. Each process writes the records of the rows that it has
read to a file of its own, which appears under its name when it is complete:

    out/record-00000-of-00002.jsonl    {"input": {"text": "a b"}, "output": {"score": 0.25}}
    out/record-00001-of-00002.jsonl
"""

import json
import math
import os
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from weft import config, errors, serialization
from weft.core.flat_dict import flatten_dict
from weft.hierarchy.module import Module
from weft.input import dispatch
from weft.serialization.directory import Directory
from weft.serialization.untrusted import check_local_path
from weft.typing import Nested

T = TypeVar("T")
Json = Any  # what `json.dumps` takes


class BaseOutputWriter(Module):
    """Base class of output writers. A subclass defines `write` and, if it buffers, `flush`."""

    def write(
        self, *, input_batch: Nested[Any], output_batch: Nested[Any]
    ) -> None:
        """Writes the inputs and outputs of a batch.

        Args:
            input_batch: Global arrays on the devices; texts are arrays of NumPy with this process's
                rows, in the order in which it has read them.
            output_batch: What the model's method has returned, or in an evaler the "output" of the
                metric calculator's `forward`.
        """
        raise NotImplementedError(type(self))

    def flush(self) -> None:
        """Flushes buffers; called after the last batch."""


class BaseRecordSink(Module):
    """Base class of sinks of records. A subclass defines `write` and `flush`."""

    class Config(Module.Config):
        """Configures a BaseRecordSink."""

        output_path: config.Required[str] = config.REQUIRED
        """The file of a process. `{process_index}` and `{process_count}` are replaced, optionally
        with a format: `out/record-{process_index:05d}.jsonl`."""

    _needs_allow = ("output_path",)  # a program sets it

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        place = {
            "process_index": jax.process_index(),
            "process_count": jax.process_count(),
        }
        if jax.process_count() > 1 and "{process_index" not in cfg.output_path:
            raise errors.InferenceError(
                f"{self.path()}: all {jax.process_count()} processes would write to output_path="
                f"{cfg.output_path!r}; add their index, such as "
                "'out/record-{process_index:05d}-of-{process_count:05d}'."
            )
        check_local_path(cfg.output_path, f"{self.path()}: output_path")
        try:
            self._output_path = Path(cfg.output_path.format(**place))
        except (KeyError, IndexError, ValueError) as error:
            raise errors.InferenceError(
                f"{self.path()}: output_path={cfg.output_path!r} is not a format of "
                f"{' and '.join(place)}: {errors.describe_error(error)}"
            ) from error

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record: a nested dict of arrays and scalars of NumPy, texts and numbers."""
        raise NotImplementedError(type(self))

    def flush(self) -> None:
        """Publishes the file with the records since the last flush, in place of an earlier file."""
        raise NotImplementedError(type(self))


class JsonlExampleRecordSink(BaseRecordSink):
    """Sink that writes one JSON object per line.

    Arrays are nested lists. Numbers that JSON cannot represent are strings, such as "nan", which
    `float` parses. Until the flush, records are in a hidden file next to the output.
    """

    Config = BaseRecordSink.Config

    def __init__(self, cfg: BaseRecordSink.Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._unfinished = self._output_path.with_name(
            f".{self._output_path.name}.unfinished"
        )
        self._file: IO[str] | None = None

    def write(self, record: dict[str, Any]) -> None:
        plain = jax.tree.map(_to_json, record)
        try:
            line = json.dumps(plain, allow_nan=False, ensure_ascii=False)
        except ValueError:
            line = json.dumps(
                jax.tree.map(_finite_or_text, plain), ensure_ascii=False
            )
        self._open().write(line + "\n")

    def flush(self) -> None:
        file = self._open()
        file.flush()
        os.fsync(file.fileno())
        file.close()
        self._file = None
        os.replace(self._unfinished, self._output_path)

    def _open(self) -> IO[str]:
        if self._file is None:
            self._output_path.parent.mkdir(parents=True, exist_ok=True)
            folder = Directory(str(self._output_path.parent))
            name = self._unfinished.name
            # One that a killed process has left; a link of its name is refused.
            if folder.has_file(name):
                folder.remove(name)
            fd = folder.descriptor(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            self._file = open(fd, "w", encoding="utf-8")  # noqa: SIM115
        return self._file


def _to_json(x: Any) -> Json:
    if hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, bytes):
        return x.decode()
    return x


def _finite_or_text(x: T) -> T | str:
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return x


class OutputConverter(Protocol):
    """Function that selects what to write."""

    def __call__(
        self, *, input_batch: Any, output_batch: Any
    ) -> Nested[np.ndarray]:
        """Returns a nested dict of arrays with one row per record.

        Both arguments are arrays of NumPy with the rows of this process; nested dicts, with the
        names of fields in place of objects. Rows may be left out, such as those of padding.
        """
        ...


class OutputRecordWriter(BaseOutputWriter):
    """Writer of one record per example.

    Rows of a batch that several processes hold are written by the first of them, rows that an
    `InputDispatcher` has added by none.
    """

    class Config(BaseOutputWriter.Config):
        """Configures an OutputRecordWriter."""

        sink: BaseRecordSink.Config = JsonlExampleRecordSink.default_config()
        converter: config.ConfigOr[OutputConverter] | None = None
        """Selects what to write; by default all, as `input` and `output`."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._converter: OutputConverter | None = config.maybe_instantiate(
            cfg.converter
        )
        self._add_child("sink", cfg.sink)

    def write(
        self, *, input_batch: Nested[Any], output_batch: Nested[Any]
    ) -> None:
        """Writes the records of a batch.

        Raises InferenceError if arrays have different numbers of rows, or an array has none.
        """
        batch = {"input_batch": input_batch, "output_batch": output_batch}
        local, is_first = _local_rows(serialization.to_state_dict(batch))
        if not is_first:
            return
        logical_row = local["input_batch"].pop(dispatch.LOGICAL_ROW_KEY, None)
        if logical_row is not None:
            local = jax.tree.map(lambda x: x[logical_row >= 0], local)
        records: Any = {
            "input": local["input_batch"],
            "output": local["output_batch"],
        }
        if self._converter is not None:
            records = self._converter(**local)
        leaves, tree = jax.tree.flatten(records)
        row_shapes = {
            np.shape(x)[:1] for x in leaves
        }  # of an array without axes, ()
        if len(row_shapes) > 1 or () in row_shapes:
            shapes = {
                "/".join(path): np.shape(x)
                for path, x in flatten_dict(records).items()
            }
            raise errors.InferenceError(
                f"{self.path()}: records need arrays with equally many rows, one per example, but "
                f"the shapes are {shapes}; set a converter that returns those to write."
            )
        for row in zip(*leaves, strict=True):
            self.sink.write(tree.unflatten(row))

    def flush(self) -> None:
        self.sink.flush()


def _local_rows(batch: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Returns this process's rows of each array, and whether it is the first that holds them.

    Outputs are laid out like the inputs, whose rows are in the order in which they were read.
    """
    spread_input = _first_spread_array(batch["input_batch"])
    if spread_input is None:
        return jax.tree.map(np.asarray, batch), True
    input_sharding: Any = spread_input.sharding
    mesh = input_sharding.mesh
    num_rows = spread_input.shape[0]
    row_sharding = NamedSharding(mesh, PartitionSpec(*input_sharding.spec[:1]))
    replicated = NamedSharding(mesh, PartitionSpec())

    def local(x: jax.Array | np.ndarray) -> Nested[np.ndarray]:
        if not isinstance(x, jax.Array):
            return np.asarray(x)
        has_rows = x.ndim > 0 and x.shape[0] == num_rows
        sharding = row_sharding if has_rows else replicated
        return dispatch.global_to_host_array(jax.device_put(x, sharding))

    block_of_device = {}
    for device, index in row_sharding.devices_indices_map((num_rows,)).items():
        first_row = dispatch.shard_start(index)[0]
        block_of_device[device] = (device.process_index, first_row)
    blocks = dispatch.blocks_by_process(block_of_device, "the batch")
    this_process = jax.process_index()
    same_rows = [
        process
        for process, rows in blocks.items()
        if rows == blocks[this_process]
    ]
    return jax.tree.map(local, batch), min(same_rows) == this_process


def _first_spread_array(tree: Nested[Any]) -> jax.Array | None:
    """Returns the first array that other processes hold a part of; None if there is none."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and x.ndim and not x.is_fully_addressable:
            return x
    return None
