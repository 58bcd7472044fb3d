"""Input pipelines on Grain: an `Input` whose source builds a Grain dataset, and functions for it.

A source is a function from a `DispatchConfig`, which says what part of the data is this process's,
to a dataset of batches:

    def source(dispatch_config):
        ds = grain.MapDataset.source(records).seed(0).shuffle().repeat(None)
        ds = shard_dataset(ds, dispatch_config)
        return per_feed_batch(ds, global_batch_size=32, dispatch_config=dispatch_config)

    cfg = Input.default_config().set(source=source)

Where every step is a `MapDataset` the state of the iterator is one integer.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import grain
import grain.experimental
import jax
import numpy as np

from weft.config import (
    REQUIRED,
    ConfigOr,
    Required,
    config_class,
    config_for_class,
    maybe_instantiate,
)
from weft.errors import InputDatasetError, InputDispatchError
from weft.hierarchy.module import Module, nowrap
from weft.input import base as input_base
from weft.input.grain_datasets import PadMapDataset, ProportionMapDataset
from weft.input.grain_iterators import (
    PadIterDataset,
    UnbatchIterDataset,
    WorkerIterDataset,
    check_num_examples,
    mark_flags_as_parsed,
)
from weft.input.records import NamedSource, RecordDataset
from weft.typing import Nested

T = TypeVar("T")

Dataset = grain.MapDataset | grain.IterDataset
Tensor = np.ndarray
SequenceOr = Sequence[T] | T
ExampleToExampleFn = Callable[[dict[str, Tensor]], dict[str, Tensor]]
PadExampleFn = Callable[[Any], Any]

GRAIN_READ_OPTIONS = config_for_class(grain.ReadOptions)
# Grain's 500 are elements; so many batches would be much memory and a slow first one. Here each
# thread has one at work and one that is ready.
_BATCHES_AHEAD = grain.ReadOptions(num_threads=16, prefetch_buffer_size=32)
_ONE_BATCH = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class RaggedTensor(list):
    """Rows of different lengths: one leaf of a batch, that `unbatch` takes apart by rows."""


@dataclasses.dataclass(frozen=True)
class DispatchConfig:
    """Which part of the data a process reads: shard `shard_index` of `num_shards`.

    Sequences are shards of shards, the outermost first: part 1 of 2, and of that part 0 of 4.

    Raises:
        InputDispatchError: If an index is not below its number.

    >>> DispatchConfig(shard_index=1, num_shards=4)
    DispatchConfig(shard_index=(1,), num_shards=(4,))
    """

    shard_index: SequenceOr[int]
    num_shards: SequenceOr[int]

    def __post_init__(self) -> None:
        for name in ("shard_index", "num_shards"):
            value = getattr(self, name)
            object.__setattr__(
                self, name, tuple(value) if isinstance(value, Sequence) else (value,)
            )
        index, num = self.levels()[0], self.levels()[1]
        if len(index) != len(num) or not all(0 <= i < n for i, n in zip(index, num, strict=True)):
            raise InputDispatchError(
                f"shard_index={index} does not fit num_shards={num}; give one index from 0 to "
                "num_shards - 1 for each number"
            )

    def levels(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Index and number of each level, as tuples."""
        return self.shard_index, self.num_shards  # pyright: ignore[reportReturnType]

    def flat_index(self) -> int:
        """Which of all innermost shards it is, those of one outer shard being neighbours."""
        flat = 0
        for index, num in zip(*self.levels(), strict=True):
            flat = flat * num + index
        return flat


class BuildDatasetFn(Protocol):
    """Builds the dataset of one process."""

    def __call__(self, dispatch_config: DispatchConfig) -> Dataset:
        """Returns a dataset of batches.

        Args:
            dispatch_config: Which part of the data the process reads.
        """
        ...


class Input(input_base.Input):
    """An input whose source builds a Grain dataset."""

    @config_class
    class Config(input_base.Input.Config):
        """Configures an Input.

        Attributes:
            source: Builds the dataset of one process.
        """

        source: Required[ConfigOr[BuildDatasetFn]] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._source: BuildDatasetFn = maybe_instantiate(cfg.source)

    @property
    def source(self) -> BuildDatasetFn:
        """The function that builds the dataset."""
        return self._source

    @nowrap
    def dataset(self) -> grain.IterDataset:
        """The batches of this process. Close its iterators, or they print at exit.

        Threads read up to 32 batches ahead of a `MapDataset`; a source that wants other
        `grain.ReadOptions` gives `maybe_to_iter_dataset(ds, read_options=…)`.
        """
        return maybe_to_iter_dataset(self._batches(), read_options=_BATCHES_AHEAD)

    @nowrap
    def element_spec(self) -> Nested[jax.ShapeDtypeStruct]:
        """As of any `Input`. Reads one batch, and none ahead of it."""
        return self._spec_of(maybe_to_iter_dataset(self._batches(), read_options=_ONE_BATCH))

    @nowrap
    def _batches(self) -> Dataset:
        if self.dispatcher:
            part = self.dispatcher.feed_read_config()
        else:
            part = {"num_shards": jax.process_count(), "shard_index": jax.process_index()}
        return self.source(DispatchConfig(**part))


def array_record_dataset(
    paths: str | Sequence[str],
    *,
    data_source_cls: Callable[..., Any] = grain.sources.ArrayRecordDataSource,
    seed: int | None,
    **data_source_cls_args: Any,
) -> grain.MapDataset:
    """The records of ArrayRecord files, one file after the other.

    Args:
        paths: One or more files.
        data_source_cls: Called with one path, gives a source: something with a length and items.
        seed: For the transformations that follow; None if they get seeds of their own.
        **data_source_cls_args: For `data_source_cls`.

    Raises:
        InputReadError: If a file cannot be opened, or later a record not read, naming both.
    """
    files = [paths] if isinstance(paths, str) else list(paths)
    source = NamedSource(files, lambda path: data_source_cls(path, **data_source_cls_args))
    ds = RecordDataset(source)
    return ds if seed is None else ds.seed(seed)


def maybe_to_iter_dataset(
    ds: Dataset, *, read_options: ConfigOr[grain.ReadOptions] = GRAIN_READ_OPTIONS
) -> grain.IterDataset:
    """A dataset to iterate over: `ds` itself if it is one.

    Args:
        ds: Any dataset.
        read_options: With how many threads to read ahead, and how far.
    """
    if isinstance(ds, grain.MapDataset):
        return ds.to_iter_dataset(maybe_instantiate(read_options))
    return ds


def prefetch_dataset(
    ds: Dataset, *, multiprocessing_options: ConfigOr[grain.MultiprocessingOptions] | None = None
) -> grain.IterDataset:
    """Reads ahead in worker processes.

    Args:
        ds: What to read. The workers get a pickled copy.
        multiprocessing_options: How many workers. None or 0: no process, only Grain's threads.

    Returns:
        The same elements in the same order. If `ds` is a `MapDataset`, its iterator has the same
        states with any number of workers. Close the iterator to end the workers.
    """
    options = maybe_instantiate(multiprocessing_options)
    if options is None or options.num_workers == 0:
        return maybe_to_iter_dataset(ds)
    if isinstance(ds, grain.MapDataset):
        return WorkerIterDataset(ds, options=options, read_options=grain.ReadOptions(1, 1))
    mark_flags_as_parsed()
    return ds.mp_prefetch(options)


def shard_dataset(ds: Dataset, dispatch_config: DispatchConfig) -> grain.MapDataset:
    """Every `num_shards`-th element, from the `shard_index`-th on.

    Args:
        ds: A `MapDataset`.
        dispatch_config: Which shard.

    Raises:
        InputDatasetError: If `ds` is not a `MapDataset`.
    """
    shard = _random_access(ds, "shard_dataset")
    for index, num in zip(*dispatch_config.levels(), strict=True):
        shard = shard.slice(slice(index, None, num))
    return shard


def shard_dataset_with_proportion(
    ds: Dataset, *, range_start: int, range_end: int, period: int
) -> grain.MapDataset:
    """The elements whose index modulo `period` lies in `range(range_start, range_end)`.

    Args:
        ds: A `MapDataset`.
        range_start: The first that is kept of each period.
        range_end: The first that is not.
        period: After how many elements it starts again.

    Raises:
        InputDatasetError: If the range is empty or not within the period, or `ds` not a
            `MapDataset`.

    >>> ds = shard_dataset_with_proportion(
    ...     grain.MapDataset.range(10), range_start=1, range_end=3, period=4)
    >>> list(ds)
    [1, 2, 5, 6, 9]
    """
    if not 0 <= range_start < range_end <= period:
        raise InputDatasetError(
            f"range {range_start} to {range_end} is empty or not within the period {period}; "
            "expected 0 <= range_start < range_end <= period"
        )
    ds = _random_access(ds, "shard_dataset_with_proportion")
    return ProportionMapDataset(ds, start=range_start, end=range_end, period=period)


def per_feed_batch(
    ds: Dataset, *, global_batch_size: int, dispatch_config: DispatchConfig, **kwargs: Any
) -> Dataset:
    """Batches of this process's share of the global batch.

    Args:
        ds: The examples of this process.
        global_batch_size: Rows over all processes that read.
        dispatch_config: How many these are.
        **kwargs: For the dataset's `batch`.

    Raises:
        InputDispatchError: If the batch does not divide.
    """
    rows = feed_batch_size(global_batch_size, dispatch_config)
    return ds.batch(rows, **kwargs)


def feed_batch_size(global_batch_size: int, dispatch_config: DispatchConfig) -> int:
    """How many rows of a global batch one shard brings.

    Args:
        global_batch_size: Rows over all shards.
        dispatch_config: How many shards there are.

    Raises:
        InputDispatchError: If the batch does not divide.
    """
    num_feeds = math.prod(dispatch_config.levels()[1])
    if global_batch_size % num_feeds:
        raise InputDispatchError(
            f"global_batch_size={global_batch_size} does not divide over {num_feeds} processes "
            f"that read; make it a multiple, as {-(-global_batch_size // num_feeds) * num_feeds}, "
            "or set an InputDispatcher with fewer logical_feed_indices"
        )
    return global_batch_size // num_feeds


def unbatch(ds: Dataset, *, skip_empty_batch: bool = False) -> grain.IterDataset:
    """The rows of batches, one by one.

    Args:
        ds: Batches whose leaves have equally many rows.
        skip_empty_batch: Whether a batch without rows is passed over, or an error.

    Returns:
        A dataset whose iterator raises `InputDatasetError` at a batch that cannot be taken apart.
    """
    return UnbatchIterDataset(maybe_to_iter_dataset(ds), skip_empty_batch=skip_empty_batch)


def default_pad_example_fn(example: Any) -> Any:
    """An example of the same structure, shapes and types, with zeros and empty strings.

    >>> default_pad_example_fn({"ids": np.array([3, 4]), "text": "abc", "n": 2})
    {'ids': array([0, 0]), 'n': 0, 'text': ''}
    """

    def pad(leaf: Any) -> Any:
        return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else type(leaf)()

    return jax.tree.map(pad, example)


def pad_for_evaluation(
    ds: Dataset,
    *,
    per_feed_batch_size: int,
    pad_example_fn: PadExampleFn = default_pad_example_fn,
    max_num_examples: int = 64_000,
) -> Dataset:
    """Adds examples of padding, so that no example is dropped from a last, smaller batch.

    Processes whose shards differ in length would end after different numbers of batches and wait
    for each other. So pad before `shard_dataset`, to a multiple of the global batch.

    Args:
        ds: A dataset that ends.
        per_feed_batch_size: To a multiple of which to pad.
        pad_example_fn: From any example to one of padding.
        max_num_examples: With more, it is taken to be endless.

    Raises:
        InputDatasetError: If there are more; an iterable raises it when it gets there.
    """
    if isinstance(ds, grain.MapDataset):
        check_num_examples(len(ds), max_num_examples)
        length = -(-len(ds) // per_feed_batch_size) * per_feed_batch_size
        return PadMapDataset(ds, length=length, pad_example_fn=pad_example_fn)
    return PadIterDataset(
        ds,
        multiple=per_feed_batch_size,
        pad_example_fn=pad_example_fn,
        max_num_examples=max_num_examples,
    )


def rekey(
    ds: Dataset,
    *,
    key_map: Mapping[str, str | None],
    default_value: Any = "",
    retain_original_inputs: bool = False,
    separator: str | None = None,
) -> Dataset:
    """Examples with other keys.

    Args:
        ds: Dicts.
        key_map: From new to old keys.
        default_value: Stands for an old key that is None, empty or missing.
        retain_original_inputs: Whether the old keys stay beside the new ones.
        separator: If given, keys are paths into nested dicts, joined by it.

    >>> ds = grain.MapDataset.source([{"q": {"text": "why"}}])
    >>> rekey(ds, key_map={"input/ids": "q/text", "label": None}, separator="/")[0]
    {'input': {'ids': 'why'}, 'label': ''}
    """

    def path(key: str) -> list[str]:
        return key.split(separator) if separator else [key]

    def lookup(example: Any, key: str | None) -> Any:
        if not key:
            return default_value
        for part in path(key):
            if not isinstance(example, Mapping) or part not in example:
                return default_value
            example = example[part]
        return example

    def fn(example: Mapping[str, Any]) -> dict[str, Any]:
        result = _copy_dicts(example) if retain_original_inputs else {}
        for new, old in key_map.items():
            *above, last = path(new)
            at = result
            for part in above:
                at = at.setdefault(part, {})
            at[last] = lookup(example, old)
        return result

    return ds.map(fn)


def sample_from_datasets(*, sources: Sequence[Dataset], weights: Sequence[float]) -> Dataset:
    """An endless mixture of datasets, each repeated, in the proportions of the weights.

    The order is a function of the weights alone: no chance decides it.

    Args:
        sources: All `MapDataset`s, or any; of the latter the mixture is an `IterDataset`.
        weights: One positive number per source.

    Raises:
        InputDatasetError: If the numbers differ or a weight is not positive.
    """
    if len(sources) != len(weights) or not sources or any(w <= 0 for w in weights):
        raise InputDatasetError(
            f"{len(sources)} sources cannot be mixed with weights={list(weights)}; give one "
            "positive weight for each of at least one source"
        )
    random_access = [ds for ds in sources if isinstance(ds, grain.MapDataset)]
    if len(random_access) == len(sources):
        endless = [ds if len(ds) >= sys.maxsize else ds.repeat(None) for ds in random_access]
        return grain.MapDataset.mix(endless, weights)
    repeated = [grain.experimental.RepeatIterDataset(maybe_to_iter_dataset(ds)) for ds in sources]
    return grain.IterDataset.mix(repeated, weights)


def _copy_dicts(example: Any) -> Any:
    if not isinstance(example, Mapping):
        return example
    return {key: _copy_dicts(value) for key, value in example.items()}


def _random_access(ds: Dataset, name: str) -> grain.MapDataset:
    if not isinstance(ds, grain.MapDataset):
        raise InputDatasetError(
            f"{name} takes elements by index, which {type(ds).__name__} cannot; call it on the "
            "MapDataset, before to_iter_dataset()"
        )
    return ds
