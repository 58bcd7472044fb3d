"""Inputs and sources of fake data, for tests, examples and benchmarks.

Batch k is a function of k, with the same rows for any number of processes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np

from weft import config, errors
from weft.hierarchy.module import Module, nowrap
from weft.input.base import Input
from weft.input.grain import (
    BuildDatasetFn,
    DispatchConfig,
    feed_rows,
    shard_dataset,
)
from weft.serialization.untrusted import check_json
from weft.typing import Nested


class EmptyInput(Input):
    """Batches without arrays, for steps that create their own data."""

    class Config(Input.Config):
        """Configures an EmptyInput or a subclass."""

        is_training: config.Required[bool] = config.REQUIRED
        """Whether the input may be endless."""
        global_batch_size: config.Required[int] = config.REQUIRED
        total_num_batches: int | None = None
        """Number of batches. None: endless."""
        source_length: int = 1024
        max_token_id: int = 2048
        """Exclusive upper bound of token ids."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if not cfg.is_training and cfg.total_num_batches is None:
            raise errors.InputDatasetError(
                f"{self.path()}: an evaluation must end, but total_num_batches=None is "
                "endless; set total_num_batches"
            )

    @nowrap
    def dataset(self) -> "FakeDataset":
        part = DispatchConfig(**self._feed_read_config())
        return FakeDataset(self, feed_rows(self.config.global_batch_size, part))

    def _global_batch(self, rng: np.random.Generator) -> Nested[np.ndarray]:
        return {}


class FakeDataset:
    """Batches of a fake input, with this process's rows."""

    def __init__(self, source: EmptyInput, rows: slice):
        self._source, self._rows = source, rows

    def __iter__(self) -> "FakeIterator":
        return FakeIterator(self._source, self._rows)


class FakeIterator(Iterator[Nested[np.ndarray]]):
    """Iterator whose state is the number of batches it has returned."""

    def __init__(self, source: EmptyInput, rows: slice):
        self._source, self._rows = source, rows
        self._next_index = 0

    def __next__(self) -> Nested[np.ndarray]:
        if self._next_index == self._source.config.total_num_batches:
            raise StopIteration
        batch = self._source._global_batch(
            np.random.default_rng(self._next_index)
        )
        self._next_index += 1
        return jax.tree.map(lambda x: x[self._rows], batch)

    def get_state(self) -> dict[str, int]:
        return {"next_index": self._next_index}

    def set_state(self, state: Mapping[str, int]) -> None:
        check_json(state, {"next_index": int})
        self._next_index = state["next_index"]


class FakeLmInput(EmptyInput):
    """Random tokens for a language model.

    Examples have `input_ids`, `target_labels`, `live_targets` and `target_num_bytes`.
    """

    def _global_batch(self, rng: np.random.Generator) -> Nested[np.ndarray]:
        cfg = self.config
        size, length = cfg.global_batch_size, cfg.source_length
        tokens = rng.integers(
            cfg.max_token_id, size=(size, length + 1), dtype=np.int32
        )
        return {
            "input_ids": tokens[:, :-1],
            "target_labels": tokens[:, 1:],
            "live_targets": np.ones((size, length), bool),
            "target_num_bytes": np.full(size, length, np.int32),
        }


class FakeSeq2SeqInput(EmptyInput):
    """Random pairs of sequences: `source/input_ids`, `target/input_ids`, `target_labels`."""

    class Config(EmptyInput.Config):
        target_length: int = 1024

    def _global_batch(self, rng: np.random.Generator) -> Nested[np.ndarray]:
        cfg = self.config
        size = cfg.global_batch_size
        source = rng.integers(
            cfg.max_token_id, size=(size, cfg.source_length), dtype=np.int32
        )
        target = rng.integers(
            cfg.max_token_id, size=(size, cfg.target_length + 1), dtype=np.int32
        )
        return {
            "source": {"input_ids": source},
            "target": {"input_ids": target[:, :-1]},
            "target_labels": target[:, 1:],
        }


class FakeSequenceClassificationInput(EmptyInput):
    """Random sequences with labels: `input_ids`, `target_labels`."""

    class Config(EmptyInput.Config):
        num_labels: int = 2

    def _global_batch(self, rng: np.random.Generator) -> Nested[np.ndarray]:
        cfg = self.config
        size = cfg.global_batch_size
        return {
            "input_ids": rng.integers(
                cfg.max_token_id, size=(size, cfg.source_length), dtype=np.int32
            ),
            "target_labels": rng.integers(
                cfg.num_labels, size=size, dtype=np.int32
            ),
        }


def fake_grain_source(
    examples: Iterable[Any],
    *,
    repeat: int | None = 1,
    shuffle_seed: int | None = None,
) -> grain.MapDataset:
    """Returns a dataset of examples.

    Args:
        repeat: Number of repetitions; None: endless.
        shuffle_seed: If set, each pass has another order.

    >>> list(fake_grain_source("ab", repeat=2))
    ['a', 'b', 'a', 'b']
    """
    ds = grain.MapDataset.source(list(examples))
    if shuffle_seed is not None:
        ds = ds.shuffle(seed=shuffle_seed)
    return ds.repeat(repeat)


def fake_source(
    is_training: bool,
    examples: Iterable[Nested[Any]],
    repeat: int | None = 1,
    spec: Nested[jax.ShapeDtypeStruct] | None = None,
    shuffle_buffer_size: int | None = None,
) -> BuildDatasetFn:
    """Returns a source of examples, sharded over the processes.

    Args:
        spec: If set, converts examples to arrays of these dtypes and checks their shapes.
        shuffle_buffer_size: 0 disables shuffling. Other sizes shuffle all examples, by index.

    Raises InputDatasetError if an example has another shape.
    """
    examples = list(examples)
    if spec is not None:
        examples = [
            _cast(example, spec, i) for i, example in enumerate(examples)
        ]
    seed = 0 if is_training and shuffle_buffer_size != 0 else None

    def build_dataset(dispatch_config: DispatchConfig) -> grain.MapDataset:
        ds = fake_grain_source(examples, repeat=repeat, shuffle_seed=seed)
        return shard_dataset(ds, dispatch_config)

    return build_dataset


def _mode(is_training: bool) -> str:
    """Returns the first word of texts."""
    return "train" if is_training else "eval"


def _cast(
    example: Nested[Any], spec: Nested[jax.ShapeDtypeStruct], index: int
) -> Nested[Any]:
    def cast(
        path, leaf_spec: jax.ShapeDtypeStruct, value: object
    ) -> np.ndarray:
        array = np.asarray(value, leaf_spec.dtype)
        if array.shape != tuple(leaf_spec.shape):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise errors.InputDatasetError(
                f"example {index}: {name!r} has shape {array.shape}, the spec says "
                f"{tuple(leaf_spec.shape)}; change one of them"
            )
        return array

    return jax.tree_util.tree_map_with_path(cast, spec, example)


def fake_serialized_json_source(
    examples: Iterable[Nested[Any]],
) -> BuildDatasetFn:
    """Returns a source of the JSON texts of examples."""
    return fake_source(False, [json.dumps(example) for example in examples])


def fake_text_source(
    *,
    text_field_name: str = "text",
    repeat: int | None = 1,
    is_training: bool,
    shuffle_buffer_size: int | None = None,
    batch_size: int = 2,
) -> BuildDatasetFn:
    """Returns a source of `batch_size` distinct texts, such as `{"text": "train text 0"}`.

    Args:
        is_training: Whether to shuffle; selects the first word of texts, `train` or `eval`, too.
    """
    mode = _mode(is_training)
    examples = [
        {text_field_name: f"{mode} text {i}"} for i in range(batch_size)
    ]
    return fake_source(
        is_training, examples, repeat, shuffle_buffer_size=shuffle_buffer_size
    )


def fake_text2text_source(
    *,
    source_key: str = "source_text",
    target_key: str = "target_text",
    is_training: bool,
    shuffle_buffer_size: int | None = None,
) -> BuildDatasetFn:
    """Returns a source of two pairs of texts."""
    mode = _mode(is_training)
    examples = []
    for i in range(2):
        examples.append(
            {source_key: f"{mode} source {i}", target_key: f"{mode} target {i}"}
        )
    return fake_source(
        is_training, examples, shuffle_buffer_size=shuffle_buffer_size
    )


def fake_classification_source(
    *,
    source_key: str = "source_text",
    target_key: str = "target_text",
    is_training: bool,
    classes: Sequence[str],
    shuffle_buffer_size: int | None = None,
) -> BuildDatasetFn:
    """Returns a source of one text per class, with the class as its target."""
    mode = _mode(is_training)
    examples = []
    for i, name in enumerate(classes):
        examples.append({source_key: f"{mode} text {i}", target_key: name})
    return fake_source(
        is_training, examples, shuffle_buffer_size=shuffle_buffer_size
    )


def fake_classification_source_instruct_lm(
    *,
    text_key: str = "text",
    is_training: bool,
    classes: Sequence[str] = ("yes", "no"),
    shuffle_buffer_size: int | None = None,
    eoa_text: str = "<eoa>",
    eob_text: str = "<eob>",
) -> BuildDatasetFn:
    """Returns a source of one question and answer per class, each pair as one text."""
    mode = _mode(is_training)
    examples = []
    for i, name in enumerate(classes):
        examples.append(
            {text_key: f"{mode} question {i}{eob_text}{name}{eoa_text}"}
        )
    return fake_source(
        is_training, examples, shuffle_buffer_size=shuffle_buffer_size
    )


def fake_speech_source(
    *,
    is_training: bool,
    max_len: int = 100,
    num_examples: int = 100,
    speech_key: str = "speech",
    shuffle_buffer_size: int | None = None,
) -> BuildDatasetFn:
    """Returns a source of noise of various lengths, `Int16["samples"]`."""
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(num_examples):
        length = rng.integers(1, max_len + 1)
        examples.append(
            {speech_key: rng.integers(-(2**15), 2**15, length, np.int16)}
        )
    return fake_source(
        is_training, examples, shuffle_buffer_size=shuffle_buffer_size
    )


def fake_glue_source(
    *,
    input_key: str | Sequence[str],
    label_key: str,
    is_training: bool,
    label_value: object = 0,
    num_examples: int | None = None,
    shuffle_buffer_size: int | None = None,
    spec: Nested[jax.ShapeDtypeStruct] | None = None,
) -> BuildDatasetFn:
    """Returns a source of one or more texts with a label."""
    mode = _mode(is_training)
    keys = [input_key] if isinstance(input_key, str) else input_key
    if num_examples is None:
        num_examples = 2
    examples = []
    for i in range(num_examples):
        example: dict[str, Any] = {key: f"{mode} {key} {i}" for key in keys}
        example[label_key] = label_value
        examples.append(example)
    return fake_source(
        is_training,
        examples,
        spec=spec,
        shuffle_buffer_size=shuffle_buffer_size,
    )
