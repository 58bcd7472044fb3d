"""Helpers for trees, dtypes, meshes and batches, as users of AXLearn know them from `utils`.

A path is a string of names, joined by `separator`, or a sequence of names.
"""

import contextlib
import contextvars
import copy
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as PartitionSpec

from weft import config, errors, trainer
from weft.core.spmd import constrain
from weft.hierarchy.context import current_context
from weft.hierarchy.context_kind import fork_key
from weft.hierarchy.parameter_spec import TensorSpec as TensorSpec
from weft.inference.runner import DataPartitionType as DataPartitionType
from weft.input import dispatch
from weft.input.dispatch import current_mesh
from weft.input.dispatch import global_to_host_array as global_to_host_array
from weft.input.dispatch import input_partition_spec as input_partition_spec
from weft.struct import VDict as VDict
from weft.struct import map_blocks as map_blocks
from weft.trainer.mesh import HybridMeshShape as HybridMeshShape
from weft.trainer.mesh import MeshShape as MeshShape
from weft.trainer.mesh import infer_mesh_shape as infer_mesh_shape
from weft.trainer.model import cast_floats as cast_floats
from weft.trainer.model import cast_floats_per_param as cast_floats_per_param
from weft.trainer.optimizers.base import tree_paths as tree_paths
from weft.typing import DType, PyTree
from weft.typing import Nested as Nested
from weft.typing import NestedTensor as NestedTensor
from weft.typing import Tensor as Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
IsLeaf = Callable[[Any], bool]
Path = str | Sequence[str]


def flatten_items(
    tree: Nested[T], separator: str = "/", is_leaf: IsLeaf | None = None
) -> list[tuple[str, T]]:
    """Returns the leaves of a tree with their paths.

    >>> flatten_items({"b": {"w": 1}, "a": [2, 3]})
    [('a/0', 2), ('a/1', 3), ('b/w', 1)]
    """
    paths = jax.tree.leaves(tree_paths(tree, separator, is_leaf))
    return list(zip(paths, jax.tree.leaves(tree, is_leaf=is_leaf), strict=True))


def get_recursively(x: Nested[Any], path: Path, separator: str = "/") -> Any:
    """Returns the value at a path of nested dicts; all of `x` for an empty path.

    Raises:
        MissingStateError: a KeyError, if the path does not exist.

    >>> get_recursively({"layer": {"w": 1}}, "layer/w")
    1
    """
    names = _names(path, separator)
    for i, name in enumerate(names):
        if not isinstance(x, Mapping) or name not in x:
            content = f"a {type(x).__name__}"
            if isinstance(x, Mapping):
                content = ", ".join(map(repr, x)) or "no entries"
            parent = _joined(names[:i], separator) or "the root"
            raise errors.MissingStateError(
                f"there is no {_joined(names, separator)!r}: {parent} has {content}."
            )
        x = x[name]
    return x


def set_recursively(
    x: dict[str, Any], *, value: object, path: Path, separator: str = "/"
) -> None:
    """Sets the value at a nonempty path of nested dicts, and creates missing dicts on the way.

    Raises TreeMergeError for an empty path, or one through a leaf.

    >>> tree = {}
    >>> set_recursively(tree, value=1, path="layer/w")
    >>> tree
    {'layer': {'w': 1}}
    """
    names = _names(path, separator)
    if not names:
        raise errors.TreeMergeError(
            "the path is empty; name at least one entry to set."
        )
    for i, name in enumerate(names):
        if not isinstance(x, dict):
            raise errors.TreeMergeError(
                f"{_joined(names[:i], separator)!r} is a {type(x).__name__}, so nothing can be set "
                f"at {_joined(names, separator)!r}; give a path through dicts."
            )
        if i < len(names) - 1:
            x = x.setdefault(name, {})
        else:
            x[name] = value


def copy_recursively(
    source: Nested[Any],
    *,
    target: dict[str, Any] | None,
    path: Path,
    separator: str = "/",
) -> Any:
    """Copies the value at a path of `source` to the same path of `target`, which it returns.

    A target of None is a new dict; an empty path returns a copy of `source`, with shared arrays.
    """
    value = jax.tree.map(
        lambda leaf: leaf, get_recursively(source, path, separator)
    )
    if not _names(path, separator):
        return value
    if target is None:
        target = {}
    set_recursively(target, value=value, path=path, separator=separator)
    return target


def validate_contains_paths(x: Nested[Any], paths: Sequence[str]) -> None:
    """Raises a MissingStateError, a KeyError, unless nested dicts have all these paths."""
    for path in paths:
        get_recursively(x, path)


def get_or_none(x: Mapping[str, T] | None, key: str) -> T | None:
    """Returns an entry of a dict; None if the dict is None or lacks the entry.

    >>> get_or_none({"a": 1}, "a"), get_or_none({}, "a"), get_or_none(None, "a")
    (1, None, None)
    """
    return None if x is None else x.get(key)


def match_regex_rules(
    x: str, *, rules: Sequence[tuple[str, T]], default_value: T | None = None
) -> T | None:
    """Returns the value of the first rule whose regular expression matches all of `x`.

    >>> match_regex_rules("decoder/bias", rules=[(".*/bias", "no decay"), (".*", "decay")])
    'no decay'
    """
    for regex, value in rules:
        if re.fullmatch(regex, x):
            return value
    return default_value


def prune_tree(
    in_tree: Nested[T],
    should_prune: Callable[[str, Nested[T]], bool],
    *,
    prefix: str = "",
    separator: str = "/",
) -> Nested[T]:
    """Returns nested dicts without the entries for which `should_prune(path, entry)` is True.

    The entries of a dict are pruned before the dict itself is tested.

    >>> prune_tree({"a": {"b": 1, "c": 2}, "d": 2}, lambda path, x: x == 2)
    {'a': {'b': 1}}
    """
    if not isinstance(in_tree, Mapping):
        return in_tree
    pruned: dict[str, Nested[T]] = {}
    for name, entry in in_tree.items():
        path = f"{prefix}{separator}{name}" if prefix else name
        entry = prune_tree(
            entry, should_prune, prefix=path, separator=separator
        )
        if not should_prune(path, entry):
            pruned[name] = entry
    return pruned


def prune_empty(in_tree: Nested[T]) -> Nested[T]:
    """Returns nested dicts without those that have no entries, at any depth."""
    return prune_tree(
        in_tree, lambda _, entry: isinstance(entry, Mapping) and not entry
    )


def tree_merge(
    primary: Nested[Any],
    *,
    secondary: Nested[Any],
    leaf_merge_fn: Callable[[Any, Any], Any],
) -> Nested[Any]:
    """Merges nested dicts; where both have a leaf, the result has `leaf_merge_fn(first, second)`.

    Raises TreeMergeError if one has a dict where the other has a leaf.

    >>> tree_merge({"a": 1}, secondary={"a": 2, "b": 3}, leaf_merge_fn=max)
    {'a': 2, 'b': 3}
    """
    if not isinstance(primary, Mapping) and not isinstance(secondary, Mapping):
        return copy.deepcopy(leaf_merge_fn(primary, secondary))
    if not isinstance(primary, Mapping) or not isinstance(secondary, Mapping):
        raise errors.TreeMergeError(
            f"tree_merge: a dict meets a leaf: {primary!r:.80} and {secondary!r:.80}; merge trees "
            "of the same structure."
        )
    merged = copy.deepcopy({**secondary, **primary})
    for name in primary.keys() & secondary.keys():
        merged[name] = tree_merge(
            primary[name],
            secondary=secondary[name],
            leaf_merge_fn=leaf_merge_fn,
        )
    return merged


def non_empty_leaf_merge_fn(primary: Any, secondary: Any) -> Any:
    """Returns the one of two leaves that is not None, nor an empty string or container.

    It is a `leaf_merge_fn` of `tree_merge`.

    Raises TreeMergeError if neither is empty.

    >>> tree_merge({"b": None}, secondary={"b": 2}, leaf_merge_fn=non_empty_leaf_merge_fn)
    {'b': 2}
    """
    if _is_empty(primary):
        return secondary
    if not _is_empty(secondary):
        raise errors.TreeMergeError(
            f"both trees have a value for one leaf: {primary!r:.80} and {secondary!r:.80}; give "
            "one of them None."
        )
    return primary


def _is_empty(x: Any) -> bool:
    return x is None or (isinstance(x, str | Mapping | Sequence) and not x)


def expand_vdicts(tree: Nested[Any]) -> Nested[Any]:
    """Replaces each `VDict` by a list of dicts, one for each index of the leading axis."""

    def is_vdict(x: Any) -> bool:
        return isinstance(x, VDict)

    def expanded(x: Any) -> Any:
        if not is_vdict(x):
            return x
        num_layers = max(map(len, jax.tree.leaves(x)), default=0)
        layers: list[Nested[Any]] = []
        for i in range(num_layers):
            layer = {name: _at(i, entry) for name, entry in x.items()}
            layers.append(expand_vdicts(layer))
        return layers

    return jax.tree.map(expanded, tree, is_leaf=is_vdict)


vectorized_tree_map = map_blocks
NestedPartitionSpec = Nested[PartitionSpec | None]


def shapes(nested_tensor: NestedTensor) -> Nested[Any]:
    """Returns the shape of each array of a tree, None for other leaves."""
    return jax.tree.map(lambda x: getattr(x, "shape", None), nested_tensor)


def count_model_params(tree: NestedTensor) -> int:
    """Returns the number of elements of all arrays of a tree."""
    return sum(x.size for x in jax.tree.leaves(tree))


@runtime_checkable
class PerParamFn(Protocol[T_co]):
    """Function from parameters to one value for each of them."""

    def __call__(self, params: NestedTensor, /) -> Nested[T_co]:
        """Returns a tree with the structure of `params`."""
        ...


def per_param_dtype_by_path(
    default_dtype: DType | None = None,
    *,
    update_rules: Sequence[tuple[str, DType | None]] | None = None,
) -> PerParamFn[DType | None]:
    """Returns dtypes by regular expressions on paths; see `per_param_train_dtype_by_path`."""
    return trainer.per_param_train_dtype_by_path(
        default_dtype, update_rules=update_rules or ()
    )


def canonicalize_per_param_dtype(
    param_dtype: DType | config.ConfigOr[PerParamFn[DType | None]] | None,
) -> config.ConfigOr[PerParamFn[DType | None]]:
    """Returns a function of parameters, or its config, unchanged; for a dtype, the config of one.

    >>> canonicalize_per_param_dtype("bfloat16").instantiate()({"w": jnp.ones(2)})
    {'w': 'bfloat16'}
    """
    if param_dtype is None or isinstance(param_dtype, str | type | np.dtype):
        return config.config_for_function(per_param_dtype_by_path).set(
            default_dtype=param_dtype
        )
    return param_dtype  # pyright: ignore[reportReturnType]


def register_per_param_settings(
    settings: Nested[T], *, description: str, path: str | None = None
) -> Nested[T]:
    """Logs a setting of each parameter, such as its learning rate, and returns the settings.

    Args:
        description: what is set.
        path: of what sets it; that of the current invocation by default.
    """
    context = current_context()
    if not path:
        path = context.path() if context else ""
    logger = logging.getLogger("weft.utils")
    for name, setting in flatten_items(settings):
        logger.info("%s %s: %s = %s", path, description, name, setting)
    return settings


def validate_float_dtype(dtype: DType) -> None:
    """Raises an ArgumentValueError unless a dtype is a floating-point one."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise errors.ArgumentValueError(
            f"{jnp.dtype(dtype)} is not a floating-point dtype; expected one such as float32 or "
            "bfloat16."
        )


def check_param_shape_alignment(
    source_tree: NestedTensor, target_tree: NestedTensor
) -> str | None:
    """Returns a message about arrays of different shapes in two trees, or None."""
    target_arrays = dict(flatten_items(target_tree))
    lines: list[str] = []
    for path, array in flatten_items(source_tree):
        target_shape = target_arrays[path].shape
        if array.shape != target_shape:
            lines.append(
                f"({path}): source: {array.shape}, target: {target_shape}"
            )
    return "\n".join(lines) or None


def as_tensor(x: Nested[Any]) -> NestedTensor:
    """Returns a tree with each leaf as a `jax.Array`."""
    return jax.tree.map(jnp.asarray, x)


def as_numpy_array(x: Nested[Any]) -> Nested[np.ndarray]:
    """Returns a tree with each leaf as an array of NumPy."""
    return jax.tree.map(np.asarray, x)


def safe_not(mask: Tensor) -> Tensor:
    """Returns the logical negation, such as the mask of paddings."""
    return jnp.logical_not(mask)


def sequence_mask(
    *, lengths: Tensor, max_len: int, dtype: jax.typing.DTypeLike = jnp.bool_
) -> Tensor:
    """Returns a mask `[..., max_len]` that is true at the first `lengths` `[...]` positions.

    >>> sequence_mask(lengths=jnp.array([1, 3]), max_len=3, dtype="int32").tolist()
    [[1, 0, 0], [1, 1, 1]]
    """
    positions = jax.lax.broadcasted_iota(
        lengths.dtype, (*lengths.shape, max_len), lengths.ndim
    )
    return (positions < lengths[..., None]).astype(dtype)


class StackedKeyArray(NamedTuple):
    """PRNG keys along leading axes, as `split_prng_key` makes them."""

    keys: Any


def split_prng_key(
    prng_key: Tensor | StackedKeyArray, num_keys: int | Sequence[int]
) -> StackedKeyArray:
    """Splits keys off a key one by one, so that the first ones do not depend on `num_keys`.

    Args:
        prng_key: a key; keys that are split already are returned unchanged.
        num_keys: the sizes of the leading axes of the result.

    >>> split_prng_key(jax.random.key(0), (3, 2)).keys.shape
    (3, 2)
    """
    if isinstance(prng_key, StackedKeyArray):
        return prng_key
    sizes = (num_keys,) if isinstance(num_keys, int) else tuple(num_keys)
    return StackedKeyArray(_split(prng_key, sizes))


def _split(prng_key: Tensor, sizes: tuple[int, ...]) -> Tensor:
    if not sizes:
        return prng_key
    keys = fork_key(prng_key, sizes[0])
    return jax.vmap(lambda key: _split(key, sizes[1:]))(keys)


_numeric_checks = contextvars.ContextVar("numeric_checks", default=False)


@contextlib.contextmanager
def numeric_checks(enabled: bool = True) -> Iterator[None]:
    """Makes `check_numerics` check, until the block ends; by default it does not."""
    token = _numeric_checks.set(enabled)
    try:
        yield
    finally:
        _numeric_checks.reset(token)


def check_numerics(x: Tensor, msg_fmt: str = "", **msg_kwargs: Any) -> Tensor:
    """Returns an array, in a block of `numeric_checks` after checking that all of it is finite.

    Args:
        msg_fmt: part of the error's message, to format with `msg_kwargs`.

    Raises ArgumentValueError if the array has NaN or infinities.

    >>> with numeric_checks():
    ...     print(check_numerics(jnp.ones(2), "the loss of step {step}", step=3))
    [1. 1.]
    """
    if _numeric_checks.get() and not bool(jnp.all(jnp.isfinite(x))):
        raise errors.ArgumentValueError(
            f"{msg_fmt.format(**msg_kwargs) or 'an array'} is not finite: {x}. Find its cause with "
            "`jax.debug_nans`."
        )
    return x


_data_dir = contextvars.ContextVar[str | None]("data_dir", default=None)


@contextlib.contextmanager
def set_data_dir(data_dir: str) -> Iterator[None]:
    """Sets what `get_data_dir` returns, until the block ends.

    Raises ArgumentValueError if an enclosing block or the variable DATA_DIR has another directory.
    """
    if get_data_dir() not in (None, data_dir):
        raise errors.ArgumentValueError(
            f"set_data_dir({data_dir!r}) contradicts {get_data_dir()!r} of an enclosing block or "
            "of the environment variable DATA_DIR; set only one of them."
        )
    token = _data_dir.set(data_dir)
    try:
        yield
    finally:
        _data_dir.reset(token)


def get_data_dir() -> str | None:
    """Returns the directory of `set_data_dir`, else the environment variable DATA_DIR, or None.

    >>> with set_data_dir("/data"):
    ...     get_data_dir()
    '/data'
    """
    return _data_dir.get() or os.environ.get("DATA_DIR")


def thread_stack_traces() -> list[list[str]]:
    """Returns for each Python thread its name and the lines of its stack."""
    frames = sys._current_frames()
    stacks: list[list[str]] = []
    for thread in threading.enumerate():
        if thread.ident in frames:
            lines = traceback.format_stack(frames[thread.ident])
            stacks.append([f"{thread.name} ({thread.ident})", *lines])
    return stacks


def create_device_mesh(
    mesh_shape: MeshShape | HybridMeshShape,
    *,
    devices: Sequence[Any] | None = None,
) -> np.ndarray:
    """Returns an array of devices for `jax.sharding.Mesh`; see `weft.trainer.build_mesh`.

    Raises MeshError if the shape does not fit the devices.
    """
    sizes = (
        mesh_shape.ici_mesh_shape
        if isinstance(mesh_shape, HybridMeshShape)
        else mesh_shape
    )
    names = [f"axis{i}" for i in range(len(sizes))]
    return trainer.build_mesh(mesh_shape, names, devices).devices


def maybe_shard(
    x: NestedTensor, partition_spec: PartitionSpec | None
) -> NestedTensor:
    """Constrains the layout of arrays; does nothing for a spec of None or without a mesh."""
    if partition_spec is None:
        return x
    return constrain(x, partition_spec)


def with_sharding_constraint(
    x: NestedTensor, shardings: Nested[PartitionSpec | None]
) -> NestedTensor:
    """Constrains the layout of arrays; does nothing without a mesh.

    Args:
        shardings: one layout for all arrays, or a tree of them that is a prefix of `x`.
    """
    return jax.tree.map(
        lambda spec, part: maybe_shard(part, spec),
        shardings,
        x,
        is_leaf=_is_layout,
    )


def complete_partition_spec_tree(
    treedef: Any, partition_spec_tree: Nested[PartitionSpec | None]
) -> PyTree:
    """Returns a tree of specs with the structure `treedef` from one that is a prefix of it."""
    tree = treedef.unflatten([0] * treedef.num_leaves)

    def repeated(spec: PartitionSpec | None, part: PyTree) -> PyTree:
        return jax.tree.map(lambda _: spec, part)

    return jax.tree.map(repeated, partition_spec_tree, tree, is_leaf=_is_layout)


def data_partition_type_to_spec(
    partition: DataPartitionType | PartitionSpec,
) -> PartitionSpec:
    """Returns the layout of rows over the mesh in the context; a PartitionSpec is unchanged."""
    if isinstance(partition, DataPartitionType):
        return partition.partition_spec(current_mesh())
    return partition


def host_to_global_array(
    host_arrays: Nested[np.ndarray | Tensor],
    *,
    partition: DataPartitionType | PartitionSpec = DataPartitionType.FULL,
) -> NestedTensor:
    """Creates one global array per leaf from the rows of each process.

    See `weft.input.host_to_global_device_array`.
    """
    spec = data_partition_type_to_spec(partition)
    return dispatch.host_to_global_device_array(host_arrays, partition=spec)


host_to_global_device_array = host_to_global_array


def replicate_to_local_data(x: NestedTensor) -> Nested[np.ndarray]:
    """Returns all of each global array as an array of NumPy, in every process."""
    return multihost_utils.process_allgather(x, tiled=True)


def _is_layout(x: object) -> bool:
    return x is None or isinstance(x, PartitionSpec)


def _names(path: Path, separator: str) -> list[str]:
    if isinstance(path, str):
        return [name for name in path.split(separator) if name]
    return list(path)


def _joined(names: list[str], separator: str) -> str:
    return str(separator).join(map(str, names))


def _at(i: int, tree: Nested[Any]) -> Nested[Any]:
    return jax.tree.map(lambda x: x[i], tree)
