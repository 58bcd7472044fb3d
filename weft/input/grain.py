"""Input pipelines on Grain: an `Input` of a Grain dataset, and functions for datasets.

A source is a function from a `DispatchConfig`, which selects this process's part of the data, to a
dataset of batches:

    def source(dispatch_config):
        ds = grain.MapDataset.source(records).seed(0).shuffle().repeat(None)
        ds = shard_dataset(ds, dispatch_config)
        return per_feed_batch(ds, global_batch_size=32, dispatch_config=dispatch_config)

    cfg = Input.default_config().set(source=source)

If every step is a `MapDataset`, the state of the iterator is one integer.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import grain.experimental
import jax
import numpy as np
from jaxtyping import PyTree

from weft import config, errors
from weft.hierarchy.module import Module, nowrap
from weft.input import base as input_base
from weft.input import grain_datasets
from weft.input.record_dataset import RecordDataset
from weft.input.records import FileRecordSource
from weft.typing import Nested

T = TypeVar("T")

Dataset = grain.MapDataset | grain.IterDataset
Tensor = np.ndarray
SequenceOr = Sequence[T] | T
ExampleToExampleFn = Callable[[dict[str, Tensor]], dict[str, Tensor]]
PadExampleFn = Callable[[Any], Any]

GRAIN_READ_OPTIONS = config.config_for_class(grain.ReadOptions)
# Grain's default of 500 elements would be many batches, with much memory and a slow start. Here
# each thread has one batch in progress and one ready.
_BATCHES_AHEAD = grain.ReadOptions(num_threads=16, prefetch_buffer_size=32)
# For sources that are fast, or read ahead of the step by the trainer.
IN_STEP = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class RaggedTensor(list):
    """Rows of different lengths: one leaf of a batch, which `unbatch` splits by rows."""


@dataclasses.dataclass(frozen=True)
class DispatchConfig:
    """Part of the data that a process reads: shard `shard_index` of `num_shards`.

    Sequences denote nested shards, outermost first.

    Raises InputDispatchError if an index is not below its number.

    >>> DispatchConfig(shard_index=1, num_shards=4)
    DispatchConfig(shard_index=(1,), num_shards=(4,))
    """

    shard_index: SequenceOr[int]
    num_shards: SequenceOr[int]

    def __post_init__(self) -> None:
        for name in ("shard_index", "num_shards"):
            value = getattr(self, name)
            levels = tuple(value) if isinstance(value, Sequence) else (value,)
            object.__setattr__(self, name, levels)
        index, num = self.levels()
        if len(index) != len(num) or not all(
            0 <= i < n for i, n in zip(index, num, strict=True)
        ):
            raise errors.InputDispatchError(
                f"shard_index={index} does not fit num_shards={num}; expected one index from 0 "
                "to num_shards - 1 for each number"
            )

    def levels(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns indices and numbers of all levels, as tuples."""
        return self.shard_index, self.num_shards  # pyright: ignore[reportReturnType]

    def flat_index(self) -> int:
        """Returns the index among all innermost shards, grouped by outer shard."""
        flat = 0
        for index, num in zip(*self.levels(), strict=True):
            flat = flat * num + index
        return flat


class BuildDatasetFn(Protocol):
    """Builds the dataset of one process."""

    def __call__(self, dispatch_config: DispatchConfig) -> Dataset:
        """Returns a dataset of batches."""
        ...


class Input(input_base.Input):
    """Input whose source builds a Grain dataset."""

    class Config(input_base.Input.Config):
        source: config.Required[config.ConfigOr[BuildDatasetFn]] = (
            config.REQUIRED
        )

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._source: BuildDatasetFn = config.maybe_instantiate(cfg.source)

    @property
    def source(self) -> BuildDatasetFn:
        """Function that builds the dataset."""
        return self._source

    @nowrap
    def dataset(self) -> grain.IterDataset:
        """Returns the batches of this process. Close its iterators, or they print at exit.

        Threads read up to 32 batches ahead of a `MapDataset`; a source can set other
        `grain.ReadOptions` with `maybe_to_iter_dataset(ds, read_options=…)`.
        """
        return maybe_to_iter_dataset(
            self._batches(), read_options=_BATCHES_AHEAD
        )

    @nowrap
    def element_spec(self) -> Nested[jax.ShapeDtypeStruct]:
        return self._spec_of(
            maybe_to_iter_dataset(self._batches(), read_options=IN_STEP)
        )

    @nowrap
    def _batches(self) -> Dataset:
        return self.source(DispatchConfig(**self._feed_read_config()))


def array_record_dataset(
    paths: str | Sequence[str],
    *,
    data_source_cls: Callable[..., Any] = grain.sources.ArrayRecordDataSource,
    seed: int | None,
    **data_source_cls_args: object,
) -> grain.MapDataset:
    """Returns the records of ArrayRecord files, one file after the other.

    Args:
        data_source_cls: Creates a source, with a length and items, from a path.
        seed: For the following transformations; None if they have their own seeds.

    Raises InputReadError if a file or record cannot be read; names both.
    """
    files = [paths] if isinstance(paths, str) else list(paths)
    source = FileRecordSource(
        files, lambda path: data_source_cls(path, **data_source_cls_args)
    )
    ds = RecordDataset(source)
    if seed is None:
        return ds
    return ds.seed(seed)


def maybe_to_iter_dataset(
    ds: Dataset,
    *,
    read_options: config.ConfigOr[grain.ReadOptions] = GRAIN_READ_OPTIONS,
) -> grain.IterDataset:
    """Converts to an `IterDataset`, unless `ds` is one."""
    if isinstance(ds, grain.MapDataset):
        return ds.to_iter_dataset(config.maybe_instantiate(read_options))
    return ds


def prefetch_dataset(
    ds: Dataset,
    *,
    multiprocessing_options: config.ConfigOr[grain.MultiprocessingOptions]
    | None = None,
) -> grain.IterDataset:
    """Reads ahead in worker processes, keeping the order.

    Args:
        multiprocessing_options: Number of workers. None or 0: only Grain's threads.

    Returns a dataset whose iterators must be closed to end the workers. If `ds` is a `MapDataset`,
    their states do not depend on the number of workers.
    """
    options = config.maybe_instantiate(multiprocessing_options)
    if options is None or options.num_workers == 0:
        return maybe_to_iter_dataset(ds)
    if isinstance(ds, grain.MapDataset):
        return grain_datasets.IterDataset(
            grain_datasets.WorkerIterator, ds, options=options
        )
    grain_datasets.mark_flags_as_parsed()
    return ds.mp_prefetch(options)


def shard_dataset(
    ds: Dataset, dispatch_config: DispatchConfig
) -> grain.MapDataset:
    """Selects every `num_shards`-th element, starting at `shard_index`.

    Raises InputDatasetError if `ds` is not a `MapDataset`.
    """
    shard = _require_map_dataset(ds, "shard_dataset")
    for index, num in zip(*dispatch_config.levels(), strict=True):
        shard = shard.slice(slice(index, None, num))
    return shard


def shard_dataset_with_proportion(
    ds: Dataset, *, range_start: int, range_end: int, period: int
) -> grain.MapDataset:
    """Selects elements whose index modulo `period` is in `range(range_start, range_end)`.

    Raises InputDatasetError for an empty range, one not within the period, or no `MapDataset`.

    >>> ds = shard_dataset_with_proportion(
    ...     grain.MapDataset.range(10), range_start=1, range_end=3, period=4)
    >>> list(ds)
    [1, 2, 5, 6, 9]
    """
    if not 0 <= range_start < range_end <= period:
        raise errors.InputDatasetError(
            f"range {range_start} to {range_end} is empty or not within the period {period}; "
            "expected 0 <= range_start < range_end <= period"
        )
    ds = _require_map_dataset(ds, "shard_dataset_with_proportion")
    return grain_datasets.ProportionMapDataset(
        ds, start=range_start, end=range_end, period=period
    )


def per_feed_batch(
    ds: Dataset,
    *,
    global_batch_size: int,
    dispatch_config: DispatchConfig,
    **kwargs: Any,
) -> Dataset:
    """Batches this process's share of the global batch.

    Args:
        global_batch_size: Rows over all processes that read.

    Raises InputDispatchError if the batch size does not divide.
    """
    return ds.batch(
        feed_batch_size(global_batch_size, dispatch_config), **kwargs
    )


def check_batch_size(global_batch_size: int) -> None:
    """Raises an InputDispatchError unless the number is positive."""
    if global_batch_size < 1:
        raise errors.InputDispatchError(
            f"global_batch_size={global_batch_size} is not a number of rows; expected 1 or more."
        )


def feed_batch_size(
    global_batch_size: int, dispatch_config: DispatchConfig
) -> int:
    """Returns the number of rows of a global batch in one shard.

    Raises InputDispatchError if the batch size is not positive, or does not divide.
    """
    check_batch_size(global_batch_size)
    num_feeds = math.prod(dispatch_config.levels()[1])
    if global_batch_size % num_feeds:
        fewer = max(
            n for n in range(1, num_feeds) if global_batch_size % n == 0
        )
        raise errors.InputDispatchError(
            f"global_batch_size={global_batch_size} does not divide over {num_feeds} processes "
            "that read; use a multiple, such as "
            f"{-(-global_batch_size // num_feeds) * num_feeds}, start {fewer} process(es), or set "
            "the input's input_dispatcher to an InputDispatcher with "
            f"global_logical_batch_size={global_batch_size}"
        )
    return global_batch_size // num_feeds


def feed_rows(global_batch_size: int, dispatch_config: DispatchConfig) -> slice:
    """Returns the rows of a global batch that are in one shard; errors as in `feed_batch_size`.

    >>> feed_rows(8, DispatchConfig(shard_index=1, num_shards=4))
    slice(2, 4, None)
    """
    rows = feed_batch_size(global_batch_size, dispatch_config)
    start = rows * dispatch_config.flat_index()
    return slice(start, start + rows)


def unbatch(
    ds: Dataset, *, skip_empty_batch: bool = False
) -> grain.IterDataset:
    """Splits batches into rows.

    Args:
        skip_empty_batch: Whether to skip batches without rows, or to raise an error.

    Returns a dataset whose iterator raises `InputDatasetError` for a batch that cannot be split.
    """
    return grain_datasets.IterDataset(
        grain_datasets.UnbatchIterator,
        maybe_to_iter_dataset(ds),
        skip_empty_batch=skip_empty_batch,
    )


def default_pad_example_fn(example: PyTree) -> PyTree:
    """Returns an example of the same structure, shapes and types, with zeros and empty strings.

    >>> default_pad_example_fn({"ids": np.array([3, 4]), "text": "abc", "n": 2})
    {'ids': array([0, 0]), 'n': 0, 'text': ''}
    """

    def pad(leaf: T) -> T | np.ndarray:
        if isinstance(leaf, np.ndarray):
            return np.zeros_like(leaf)
        return type(leaf)()

    return jax.tree.map(pad, example)


def pad_for_evaluation(
    ds: Dataset,
    *,
    per_feed_batch_size: int,
    pad_example_fn: PadExampleFn = default_pad_example_fn,
    max_num_examples: int = 64_000,
) -> Dataset:
    """Appends padding examples, so that no example is dropped from a last, smaller batch.

    Pads to a multiple of `per_feed_batch_size`. Pad before `shard_dataset`, to a multiple of the
    global batch: processes with shards of different lengths would deadlock.

    Raises InputDatasetError if `ds` has more than `max_num_examples`, like endless datasets; for an
    iterable, when it reaches them.
    """
    if isinstance(ds, grain.MapDataset):
        grain_datasets.check_num_examples(len(ds), max_num_examples)
        length = -(-len(ds) // per_feed_batch_size) * per_feed_batch_size
        return grain_datasets.PadMapDataset(
            ds, length=length, pad_example_fn=pad_example_fn
        )
    return grain_datasets.IterDataset(
        grain_datasets.PadIterator,
        ds,
        multiple=per_feed_batch_size,
        pad_example_fn=pad_example_fn,
        max_num_examples=max_num_examples,
    )


def rekey(
    ds: Dataset,
    *,
    key_map: Mapping[str, str | None],
    default_value: object = "",
    retain_original_inputs: bool = False,
    separator: str | None = None,
) -> Dataset:
    """Renames the keys of examples.

    Args:
        key_map: New to old keys.
        default_value: Replaces an old key that is None, empty or missing.
        separator: If set, keys are paths into nested dicts, joined by it.

    >>> ds = grain.MapDataset.source([{"q": {"text": "why"}}])
    >>> rekey(ds, key_map={"input/ids": "q/text", "label": None}, separator="/")[0]
    {'input': {'ids': 'why'}, 'label': ''}
    """

    def path(key: str) -> list[str]:
        if not separator:
            return [key]
        return key.split(separator)

    def lookup(example: object, key: str | None) -> Any:
        if not key:
            return default_value
        for part in path(key):
            if not isinstance(example, Mapping) or part not in example:
                return default_value
            example = example[part]
        return example

    def fn(example: Mapping[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if retain_original_inputs:
            result = _copy_dicts(example)
        for new_key, old_key in key_map.items():
            *parent_keys, last_key = path(new_key)
            parent = result
            for key in parent_keys:
                parent = parent.setdefault(key, {})
            parent[last_key] = lookup(example, old_key)
        return result

    return ds.map(fn)


def sample_from_datasets(
    *, sources: Sequence[Dataset], weights: Sequence[float]
) -> Dataset:
    """Mixes repeated datasets endlessly and deterministically, in the proportions of the weights.

    Args:
        sources: Datasets; the mixture is an `IterDataset` unless all are `MapDataset`s.
        weights: One positive number per source.

    Raises InputDatasetError if the lengths differ or a weight is not positive.
    """
    if (
        len(sources) != len(weights)
        or not sources
        or any(w <= 0 for w in weights)
    ):
        raise errors.InputDatasetError(
            f"{len(sources)} sources cannot be mixed with weights={list(weights)}; pass one "
            "positive weight for each of at least one source"
        )
    random_access = [ds for ds in sources if isinstance(ds, grain.MapDataset)]
    if len(random_access) == len(sources):
        endless = []
        for ds in random_access:
            endless.append(ds if len(ds) >= sys.maxsize else ds.repeat(None))
        return grain.MapDataset.mix(endless, weights)
    repeated = [
        grain.experimental.RepeatIterDataset(maybe_to_iter_dataset(ds))
        for ds in sources
    ]
    return grain.IterDataset.mix(repeated, weights)


def _copy_dicts(example: PyTree) -> PyTree:
    if not isinstance(example, Mapping):
        return example
    return {key: _copy_dicts(value) for key, value in example.items()}


def _require_map_dataset(ds: Dataset, name: str) -> grain.MapDataset:
    if not isinstance(ds, grain.MapDataset):
        raise errors.InputDatasetError(
            f"{name} accesses elements by index, which {type(ds).__name__} does not support; "
            "call it on the MapDataset, before to_iter_dataset()"
        )
    return ds
