"""Index of a checkpoint: the structure of its state, without the values of arrays.

A pytree becomes a flat list of paths, such as `learner/optimizer/0/mu/decoder/emb/weight`, each
with the shape, dtype and layout of an array, or the value of a Python number or string. Two states
match if their lists match, whatever their containers.
"""

import enum
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from weft import config, errors
from weft.core import flat_dict
from weft.hierarchy.parameter_spec import TensorSpec
from weft.serialization.directory import Directory
from weft.serialization.untrusted import (
    MAX_COUNT,
    check_json,
    check_json_size,
    is_possible_shape,
)
from weft.trainer.checkpointer import dirs
from weft.trainer.checkpointer.host_state import PythonSavable
from weft.typing import DType, Nested, PartitionSpec

INDEX = "index"
_VERSION = 1
_MAX_LINES = 8

Entry = Mapping[str, Any] | bool | int | float | str
"""Python value, or a dict: "shape", "dtype" and "spec" of an array, "savable" of an object that
saves its own state."""

Index = Sequence[tuple[str, Entry]]
"""Entries by path."""

ArrayOrSpec = (
    jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | TensorSpec
)


class CheckpointValidationType(enum.StrEnum):
    """Strictness of the comparison between a checkpoint and the state to restore.

    Attributes:
        EXACT: The same paths, shapes and dtypes.
        EXACT_UP_TO_DTYPE: The same paths and shapes; arrays are converted to the state's dtypes.
        CONTAINS_STATE: The checkpoint has all that the state has, and may have more.
        CONTAINS_STATE_UP_TO_DTYPE: As CONTAINS_STATE; arrays are converted.
    """

    EXACT = "EXACT"
    EXACT_UP_TO_DTYPE = "EXACT_UP_TO_DTYPE"
    CONTAINS_STATE = "CONTAINS_STATE"
    CONTAINS_STATE_UP_TO_DTYPE = "CONTAINS_STATE_UP_TO_DTYPE"

    @property
    def checks_dtype(self) -> bool:
        """True if dtypes must be the same."""
        return not self.value.endswith("UP_TO_DTYPE")

    @property
    def allows_more(self) -> bool:
        """True if the checkpoint may have leaves that the state lacks."""
        return self.value.startswith("CONTAINS_STATE")

    @property
    def allowing_more(self) -> "CheckpointValidationType":
        """The corresponding type for a part of the state."""
        return CheckpointValidationType(
            self.value.replace("EXACT", "CONTAINS_STATE")
        )


class IndexFileWriter(Protocol):
    """Function that writes an index into the directory of a checkpoint."""

    def __call__(self, ckpt_dir: str, index: Index) -> None:
        """Writes `index` into `ckpt_dir`."""
        ...


def flatten_state(state: Nested[Any]) -> list[tuple[str, Any]]:
    """Returns the leaves of a state by path; raises CheckpointStateError if two paths are equal."""
    leaves: dict[str, Any] = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(
        state, is_leaf=is_state_leaf
    ):
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        if path in leaves:
            raise errors.CheckpointStateError(
                f"the state has two leaves with the path {path!r}; a name may contain '/'. "
                "Rename one of them."
            )
        leaves[path] = leaf
    return list(leaves.items())


def is_state_leaf(x: object) -> bool:
    """Returns whether an object of a state is saved as a whole."""
    return isinstance(x, PythonSavable | TensorSpec)


def is_array(x: object) -> TypeGuard[ArrayOrSpec]:
    """Returns whether a leaf of a state is an array or the shape of one."""
    return isinstance(x, ArrayOrSpec)


def is_key_dtype(dtype: DType) -> bool:
    """Returns whether a dtype is that of typed PRNG keys, as of `jax.random.key`."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def build_index(state: Nested[Any]) -> list[tuple[str, Entry]]:
    """Returns the index of a state: arrays, their shapes, Python values and savable objects.

    Raises CheckpointStateError if it holds a value of another type.

    >>> build_index({"step": 3, "w": np.zeros((2, 3), np.float32)})
    [('step', 3), ('w', {'shape': [2, 3], 'dtype': 'float32', 'spec': None})]
    """
    return [(path, _entry(path, leaf)) for path, leaf in flatten_state(state)]


def _entry(path: str, leaf: object) -> Entry:
    if isinstance(leaf, PythonSavable):
        return {"savable": type(leaf).__name__}
    if is_array(leaf):
        if is_key_dtype(leaf.dtype):
            dtype_name = str(leaf.dtype)
        else:
            dtype_name = jnp.dtype(leaf.dtype).name
        shape = [int(size) for size in leaf.shape]
        return {"shape": shape, "dtype": dtype_name, "spec": _layout(leaf)}
    if isinstance(leaf, bool | int | float | str):
        return leaf
    raise errors.CheckpointStateError(
        f"the state holds an object of type {type(leaf).__qualname__} at {path!r}; a checkpoint "
        "takes arrays, Python numbers and strings, and objects with `get_state` and `set_state`."
    )


def _layout(leaf: ArrayOrSpec) -> list[str | list[str] | None] | None:
    """Returns the mesh axes of each dimension; None for an array without a mesh."""
    if isinstance(leaf, TensorSpec):
        spec = leaf.partition_spec
    else:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return None
        spec = sharding.spec
    layout = []
    for axes in spec:
        layout.append(list(axes) if isinstance(axes, tuple) else axes)
    return layout


def write_index_file(*, ckpt_dir: str, index: Index) -> None:
    """Writes the index of a checkpoint; raises a ValueError if it could not be read again."""
    content = {"version": _VERSION, "index": [list(pair) for pair in index]}
    text = json.dumps(content, indent=0)
    try:
        check_json_size(text)
    except ValueError as error:
        raise ValueError(
            f"the list of the state's leaves, {INDEX!r}, cannot be written: {error}. "
            f"{_largest_entry_text(index)}"
        ) from None
    # The writer of the manifest waits for the disk.
    Directory(ckpt_dir).write(INDEX, text, sync=False)


def _largest_entry_text(index: Index) -> str:
    path, entry = max(index, key=lambda item: len(json.dumps(item)))
    if isinstance(entry, str):
        return (
            f"The largest of its {len(index):,} leaves, {path!r}, is a text of {len(entry):,} "
            "characters: keep it in a file of its own"
        )
    return f"It has {len(index):,} leaves: stack arrays of one shape, and make numbers an array"


def read_index_file(ckpt_dir: str) -> list[tuple[str, Entry]]:
    """Reads the index of a checkpoint; raises DamagedCheckpointError if it is malformed."""

    def entries(content: Any) -> list[tuple[str, Entry]]:
        check_json(content, {"version": int, "index": [list]})
        if content["version"] != _VERSION:
            raise ValueError(
                f"it has version {content['version']}, not {_VERSION}"
            )
        pairs = [(str(path), entry) for path, entry in content["index"]]
        for path, entry in pairs:
            _check_entry(path, entry)
        return pairs

    return dirs.read_json(ckpt_dir, INDEX, "the index of a checkpoint", entries)


_ENTRY_FORMS = (dict, bool, int, float, str)
_ARRAY_FORM = {
    "shape": [int],
    "dtype": str,
    "spec": (None, [(None, str, [str])]),
}


def _check_entry(path: str, entry: object) -> None:
    """Raises a ValueError unless an entry is one that `build_index` makes."""
    if isinstance(entry, int) and abs(entry) > MAX_COUNT:
        return  # a number of the state may be any
    check_json(entry, _ENTRY_FORMS, path)
    if not isinstance(entry, dict):
        return
    if "shape" not in entry:
        check_json(entry, {"savable": str}, path)
        return
    check_json(entry, _ARRAY_FORM, path)
    dtype = _dtype_of_name(entry["dtype"])
    if not is_possible_shape(entry["shape"], dtype.itemsize):
        raise ValueError(
            f"{path} has the shape {entry['shape']}, which no array has"
        )


def _dtype_of_name(name: str) -> Any:
    if not name.startswith("key<"):
        return jnp.dtype(name)
    key_dtypes = {str(dtype): dtype for dtype in _key_dtypes().values()}
    return key_dtypes[name]


def read_state_spec(ckpt_dir: str) -> Nested[Any]:
    """Reads the structure of a checkpoint's state, without its arrays.

    The result has nested dicts by the parts of each path, with a `TensorSpec` for each array, and
    Python values. Savable objects are omitted.
    """
    leaves: dict[str, Any] = {}
    for path, entry in read_index_file(ckpt_dir):
        if not isinstance(entry, Mapping):
            leaves[path] = entry
        elif "shape" in entry:
            leaves[path] = _tensor_spec(entry)
    return flat_dict.unflatten_dict(leaves, sep="/")


def _tensor_spec(entry: Mapping[str, Any]) -> TensorSpec:
    shape = tuple(entry["shape"])
    partition_spec = None
    if entry["spec"] is not None:
        mesh_axes: list[str | tuple[str, ...] | None] = []
        for axes in entry["spec"]:
            mesh_axes.append(tuple(axes) if isinstance(axes, list) else axes)
        mesh_axes += [None] * (len(shape) - len(mesh_axes))
        partition_spec = PartitionSpec(*mesh_axes)
    dtype = _dtype_of_name(entry["dtype"])
    return TensorSpec(shape=shape, dtype=dtype, mesh_axes=partition_spec)


def key_implementation(dtype: DType) -> str:
    """Returns the implementation name, as `jax.random.key` takes it, of a typed keys' dtype.

    >>> key_implementation(jax.random.key(0, impl="rbg").dtype)
    'rbg'
    """
    names = {key_dtype: name for name, key_dtype in _key_dtypes().items()}
    return names[dtype]


@functools.cache
def _key_dtypes() -> dict[str, Any]:
    """Returns the dtypes of typed keys by the names of their implementations."""
    dtypes: dict[str, Any] = {}
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.eval_shape(functools.partial(jax.random.key, 0, impl=name))
        dtypes[name] = key.dtype
    return dtypes


def check_state_structure(
    ckpt_structure: Index,
    target_structure: Index,
    *,
    validation: CheckpointValidationType = CheckpointValidationType.EXACT,
) -> None:
    """Raises CheckpointStructureError unless a checkpoint can be restored to a state.

    Takes the index of each; the error names paths, shapes and dtypes on both sides.
    """
    saved = dict(ckpt_structure)
    target = dict(target_structure)
    missing_paths = [path for path in target if path not in saved]
    unused_paths = [path for path in saved if path not in target]
    extra_paths: list[str] = []
    if not validation.allows_more:
        extra_paths = unused_paths
    other_kinds: list[str] = []
    other_dtypes: list[str] = []
    for path in target.keys() & saved.keys():
        if _kind(saved[path]) != _kind(target[path]):
            other_kinds.append(path)
            continue
        saved_dtype = _dtype_of(saved[path])
        target_dtype = _dtype_of(target[path])
        # Keys cannot be converted.
        must_agree = (
            validation.checks_dtype or "key<" in saved_dtype + target_dtype
        )
        if saved_dtype != target_dtype and must_agree:
            other_dtypes.append(path)
    if not (missing_paths or extra_paths or other_kinds or other_dtypes):
        return

    def describe_difference(path: str) -> str:
        return f"checkpoint {_entry_text(saved[path])}, state {_entry_text(target[path])}"

    def describe_missing(path: str) -> str:
        text = f"state {_entry_text(target[path])}, not in the checkpoint."
        similar_paths = config.similar_names(path, unused_paths)
        if similar_paths:
            text += f" Did you mean {similar_paths[0]!r}?"
        return text

    def describe_extra(path: str) -> str:
        return f"checkpoint {_entry_text(saved[path])}, not in the state"

    lines = [
        f"the checkpoint and the state differ (validation is {validation.value}):"
    ]
    lines += _list_some(sorted(other_kinds + other_dtypes), describe_difference)
    lines += _list_some(missing_paths, describe_missing)
    lines += _list_some(extra_paths, describe_extra)
    if missing_paths or other_kinds:
        lines.append(
            "Restore with the model and learner configs that it was saved with."
        )
    else:
        sufficient = "CONTAINS_STATE" if extra_paths else "EXACT"
        if other_dtypes:
            sufficient += "_UP_TO_DTYPE"
        lines.append(
            f"To restore it nevertheless, set the checkpointer's validation to {sufficient!r}."
        )
    raise errors.CheckpointStructureError("\n".join(lines))


def _list_some(paths: list[str], describe: Callable[[str], str]) -> list[str]:
    """Returns a line for each of the first paths, and one that counts the others."""
    lines = [f"  {path}: {describe(path)}" for path in paths[:_MAX_LINES]]
    if len(paths) > _MAX_LINES:
        lines.append(f"  … {len(paths) - _MAX_LINES} more")
    return lines


def _kind(entry: Entry) -> tuple[int, ...] | str | type:
    """Returns the part of an entry that must agree under every validation."""
    if not isinstance(entry, Mapping):
        return type(entry)
    if "shape" in entry:
        return tuple(entry["shape"])
    return "savable"


def _dtype_of(entry: Entry) -> str:
    if isinstance(entry, Mapping):
        return entry.get("dtype", "")
    return ""


def _entry_text(entry: Entry) -> str:
    if not isinstance(entry, Mapping):
        return f"{type(entry).__name__} {entry!r}"
    if "shape" in entry:
        return f"{entry['dtype']}{list(entry['shape'])}"
    return f"an object ({entry['savable']})"
