"""Inputs of data that a program holds: arrays, and iterables of batches.

    cfg = ArrayInput.default_config().set(arrays=Arrays({"x": x, "label": y}), global_batch_size=32)

As values of a config, `Arrays` and `Batches` are shared by its copies, and shown but not readable
in its text. A run refuses to continue on other arrays, or on batches of other shapes.
"""

import functools
import hashlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import grain.experimental
import jax
import numpy as np

from weft.config import (
    REQUIRED,
    ConfigOr,
    InMemory,
    Required,
    maybe_instantiate,
)
from weft.errors import InputDatasetError, did_you_mean
from weft.hierarchy.module import Module, nowrap
from weft.input import grain as grain_input
from weft.input.base import Input
from weft.input.prefetch import CountingIterator
from weft.typing import Nested


class Arrays(InMemory[dict[str, Any]]):
    """Arrays in memory with one row per example, by name; two are equal if all values are.

    The arrays are not copied: change them no more. Values may be nested dicts of arrays. Batches
    have JAX's dtypes: without `jax_enable_x64`, 64-bit numbers become 32-bit numbers.

    Raises InputDatasetError if there is no row, the numbers of rows differ, an array has no
    numbers, or its integers need 64 bits.

    >>> Arrays({"x": np.zeros((4, 2), np.float32), "label": [0, 1, 1, 0]}).num_rows
    4
    """

    def __init__(self, arrays: Mapping[str, Any]):
        numpy_arrays = checked_arrays(arrays)
        leaves = named_leaves(numpy_arrays)
        digest = hashlib.blake2b(digest_size=8)
        descriptions = []
        for name, x in leaves.items():
            digest.update(f"{name} {x.dtype} {x.shape}\n".encode())
            digest.update(np.ascontiguousarray(x).view(np.uint8).data)
            descriptions.append(
                f"{name} {x.dtype}[{', '.join(map(str, x.shape[1:]))}]"
            )
        self.num_rows: int = len(next(iter(leaves.values())))
        text = f"{self.num_rows} rows of {', '.join(descriptions)}, digest {digest.hexdigest()}"
        super().__init__(numpy_arrays, text)

    def take(self, indices: np.ndarray) -> dict[str, Any]:
        """Returns rows as a batch."""
        return jax.tree.map(
            lambda x: x[indices].astype(batch_dtype(x), copy=False), self.value
        )


def checked_arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts of NumPy arrays; raises an InputDatasetError like `Arrays`."""
    numpy_arrays = jax.tree.map(
        np.asarray, dict(arrays), is_leaf=lambda x: not isinstance(x, Mapping)
    )
    leaves = named_leaves(numpy_arrays)
    row_shapes = {
        x.shape[:1] for x in leaves.values()
    }  # of an array without axes, ()
    if len(row_shapes) != 1 or () in row_shapes:
        shapes = ", ".join(f"{name} {x.shape}" for name, x in leaves.items())
        raise InputDatasetError(
            f"the arrays have the shapes {shapes or 'of no array'}; expected at least one array, "
            "and the same number of rows, the first axis, in all of them."
        )
    if (0,) in row_shapes:
        raise InputDatasetError(
            f"the arrays {', '.join(leaves)} have no rows; expected some."
        )
    for name, x in leaves.items():
        _check_dtype(name, x)
    return numpy_arrays


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of nested dicts by path, such as `inputs/ids`."""
    leaves = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        leaves[jax.tree_util.keystr(path, simple=True, separator="/")] = leaf
    return leaves


def batch_dtype(x: np.ndarray) -> np.dtype:
    """Returns the dtype of an array in batches: that of JAX."""
    return jax.dtypes.canonicalize_dtype(x.dtype)


def _check_dtype(name: str, x: np.ndarray) -> None:
    if x.dtype.kind in "OSUVMm":
        raise InputDatasetError(
            f"the array {name!r} has dtype {x.dtype}; expected numbers or booleans, with rows of "
            "the same shape."
        )
    if x.dtype.kind in "iu" and x.size and x.dtype != batch_dtype(x):
        limits = np.iinfo(batch_dtype(x))
        if x.min() < limits.min or x.max() > limits.max:
            raise InputDatasetError(
                f"the array {name!r} has dtype {x.dtype} and values from {x.min()} to {x.max()}, "
                f"which do not fit {limits.dtype}; set jax_enable_x64, or use smaller numbers."
            )


def array_source(
    arrays: Arrays,
    *,
    global_batch_size: int,
    is_training: bool,
    seed: int = 0,
    padding: Mapping[str, float] | None = None,
) -> grain_input.BuildDatasetFn:
    """Returns a source of batches of arrays; batch k has the same rows for any number of processes.

    Args:
        is_training: Whether rows come endlessly, in a new order in each pass, or once, in order.
        seed: Seed of the order in training.
        padding: Values, by name, of rows that fill up the last batch of an evaluation, such as
            `{"label": -1}`, by which a model can tell that they do not count. Other arrays are
            filled up with zeros. None: the last batch is smaller.

    Raises:
        InputDatasetError: If a batch has more rows than there are, in training; or, when called, if
            several processes would share a smaller last batch.
        InputDispatchError: If `global_batch_size` is not positive.
    """
    grain_input.check_batch_size(global_batch_size)
    num_rows = arrays.num_rows
    last_batch_size = num_rows % global_batch_size
    for name in padding or ():
        if name not in arrays.value:
            raise InputDatasetError(
                f"there is no array {name!r} to pad. {did_you_mean(name, arrays.value)}"
            )
    if is_training and global_batch_size > num_rows:
        raise InputDatasetError(
            f"a batch of {global_batch_size} rows is larger than the data, which has {num_rows}; "
            f"expected a batch size of 1 to {num_rows}."
        )

    @functools.lru_cache(maxsize=2)  # a batch has rows of two passes at most
    def order_of_pass(number: int) -> np.ndarray:
        return np.random.default_rng((seed, number)).permutation(num_rows)

    def build_dataset(
        dispatch_config: grain_input.DispatchConfig,
    ) -> grain.IterDataset:
        rows = grain_input.feed_rows(global_batch_size, dispatch_config)
        is_shared = rows != slice(0, global_batch_size)
        if (
            not is_training
            and last_batch_size
            and padding is None
            and is_shared
        ):
            raise InputDatasetError(
                f"the last batch has {last_batch_size} of {global_batch_size} rows, which several "
                f"processes cannot share; set padding, or a batch size that divides {num_rows}."
            )
        num_batches = (
            sys.maxsize if is_training else -(-num_rows // global_batch_size)
        )

        def batch(index: int) -> dict[str, Any]:
            positions = index * global_batch_size + np.arange(
                rows.start, rows.stop
            )
            if is_training:
                passes, positions_in_pass = np.divmod(positions, num_rows)
                row_indices = []
                for number in np.unique(passes):
                    is_of_pass = passes == number
                    row_indices.append(
                        order_of_pass(number)[positions_in_pass[is_of_pass]]
                    )
                return take(np.concatenate(row_indices))
            if padding is None:
                positions = positions[positions < num_rows]
            return take(positions)

        ds = grain.MapDataset.range(num_batches).map(batch)
        return grain_input.maybe_to_iter_dataset(
            ds, read_options=grain_input.IN_STEP
        )

    def take(indices: np.ndarray) -> dict[str, Any]:
        batch = arrays.take(np.minimum(indices, num_rows - 1))
        is_padding = indices >= num_rows
        if is_padding.any():
            padding_values = dict.fromkeys(batch, 0.0) | dict(padding or {})
            for name, value in padding_values.items():
                for array in jax.tree.leaves(batch[name]):
                    array[is_padding] = value
        return batch

    return build_dataset


class ArrayInput(Input):
    """Input over arrays in memory, see `array_source`."""

    class Config(Input.Config):
        """Configures an ArrayInput; the fields are the arguments of `array_source`."""

        arrays: Required[ConfigOr[Arrays]] = REQUIRED
        """The data, or the config of a function that reads it."""
        global_batch_size: Required[int] = REQUIRED
        is_training: bool = True
        """Trainer and evaler set it."""
        seed: int = 0
        padding: dict[str, float] | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._source = array_source(
            maybe_instantiate(cfg.arrays),
            global_batch_size=cfg.global_batch_size,
            is_training=cfg.is_training,
            seed=cfg.seed,
            padding=cfg.padding,
        )

    @nowrap
    def dataset(self) -> grain.IterDataset:
        ds: Any = self._source(
            grain_input.DispatchConfig(**self._feed_read_config())
        )
        return ds


class Batches(InMemory[Iterable[Any]]):
    """Iterable of batches, nested dicts of NumPy arrays, or a Grain dataset of them.

    Two are equal if their first batches have the same shapes and dtypes. In several processes, each
    has its own rows of the batches.

    Raises InputDatasetError if there is no batch.
    """

    def __init__(self, batches: Iterable[Any]):
        iterator = iter(batches)
        self.is_iterator = iterator is batches
        """Whether the batches come once only, as those of a generator."""
        try:
            self.first: Any = next(iterator)
        except StopIteration:
            raise InputDatasetError(
                "there is no batch in the iterable; expected one."
            ) from None
        if self.is_iterator:
            batches = itertools.chain([self.first], iterator)
        elif hasattr(iterator, "close"):
            iterator.close()  # pyright: ignore[reportAttributeAccessIssue]
        shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", self.first)
        super().__init__(batches, f"batches of {shapes}")


class IterableInput(Input):
    """Input over an iterable of batches.

    Training repeats it, unless it is an iterator, which is used up after one pass.
    """

    class Config(Input.Config):
        """Configures an IterableInput."""

        batches: Required[Batches] = REQUIRED
        is_training: bool = True
        """Whether to repeat; trainer and evaler set it."""

    @nowrap
    def element_spec(self) -> Nested[jax.ShapeDtypeStruct]:
        return self._spec_of([self.config.batches.first])

    @nowrap
    def dataset(self) -> Iterable[Nested[np.ndarray]]:
        batches: Batches = self.config.batches
        if isinstance(batches.value, grain.MapDataset | grain.IterDataset):
            ds = grain_input.maybe_to_iter_dataset(
                batches.value, read_options=grain_input.IN_STEP
            )
            return (
                grain.experimental.RepeatIterDataset(ds)
                if self.config.is_training
                else ds
            )
        repeats = self.config.is_training and not batches.is_iterator
        make = functools.partial(_passes, batches.value, repeats)
        return CountingIterator(make(), make)


def _passes(batches: Iterable[Any], repeats: bool) -> Iterator[Any]:
    """Yields the batches once, or without end; ends after a pass without any."""
    while True:
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
        if is_empty or not repeats:
            return
