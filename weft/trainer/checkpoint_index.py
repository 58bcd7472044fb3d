"""The index of a checkpoint: what its state consists of, without the values of arrays.

A pytree becomes a flat list of paths, such as `learner/optimizer/0/mu/decoder/emb/weight`, each
with what stands there: shape, dtype and layout of an array, or the value itself of a Python number
or string. Two states fit if their lists do, whatever containers they are made of.
"""

import enum
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from weft.config import similar_names
from weft.errors import CheckpointStateError, CheckpointStructureError, DamagedCheckpointError
from weft.hierarchy.parameter_spec import TensorSpec
from weft.serialization.foreign import read_json_file
from weft.trainer.python_savables import PythonSavable
from weft.typing import Nested

INDEX = "index"
_VERSION = 1
_SHOWN = 8

Index = Sequence[tuple[str, Any]]
"""Pairs of a path and a Python value, or a dict: "shape", "dtype" and "spec" of an array, "savable"
of an object that keeps its own state."""


class CheckpointValidationType(enum.StrEnum):
    """How alike a checkpoint and the state that it is restored to must be.

    Attributes:
        EXACT: The same paths, shapes and dtypes.
        EXACT_UP_TO_DTYPE: The same paths and shapes; arrays are converted to the state's dtypes.
        CONTAINS_STATE: The checkpoint has all that the state has, and may have more.
        CONTAINS_STATE_UP_TO_DTYPE: Likewise; arrays are converted.
    """

    EXACT = "EXACT"
    EXACT_UP_TO_DTYPE = "EXACT_UP_TO_DTYPE"
    CONTAINS_STATE = "CONTAINS_STATE"
    CONTAINS_STATE_UP_TO_DTYPE = "CONTAINS_STATE_UP_TO_DTYPE"

    @property
    def checks_dtype(self) -> bool:
        """Whether dtypes have to be the same."""
        return not self.value.endswith("UP_TO_DTYPE")

    @property
    def allows_more(self) -> bool:
        """Whether the checkpoint may have what the state has not."""
        return self.value.startswith("CONTAINS_STATE")

    @property
    def allowing_more(self) -> "CheckpointValidationType":
        """This one, for a part of the state."""
        return CheckpointValidationType(self.value.replace("EXACT", "CONTAINS_STATE"))


class IndexFileWriter(Protocol):
    """Writes an index into the directory of a checkpoint."""

    def __call__(self, ckpt_dir: str, index: Index) -> None:
        """Writes it.

        Args:
            ckpt_dir: The directory.
            index: The index.
        """
        ...


def flatten_state(state: Nested[Any]) -> list[tuple[str, Any]]:
    """The leaves of a state by path.

    Args:
        state: A pytree of arrays, their shapes, Python values and savable objects.

    Raises:
        CheckpointStateError: If two leaves have the same path.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_state_leaf)
    named = [(jax.tree_util.keystr(p, simple=True, separator="/"), leaf) for p, leaf in leaves]
    paths = [path for path, _ in named]
    if len(set(paths)) != len(paths):
        twice = next(path for i, path in enumerate(paths) if path in paths[:i])
        raise CheckpointStateError(
            f"the state has two leaves with the path {twice!r}, as when a name contains '/'. "
            "Rename one of them."
        )
    return named


def is_state_leaf(x: Any) -> bool:
    """Whether a checkpoint takes this part of a state as a whole."""
    return isinstance(x, PythonSavable | TensorSpec)


def is_array(x: Any) -> bool:
    """Whether a leaf of a state is an array, or the shape of one."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | TensorSpec)


def is_key_dtype(dtype: Any) -> bool:
    """Whether these are typed PRNG keys, as of `jax.random.key`."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def build_index(state: Nested[Any]) -> list[tuple[str, Any]]:
    """The index of a state.

    Args:
        state: A pytree of arrays, their shapes, Python values and savable objects.

    Raises:
        CheckpointStateError: If it holds something else.

    >>> build_index({"step": 3, "w": np.zeros((2, 3), np.float32)})
    [('step', 3), ('w', {'shape': [2, 3], 'dtype': 'float32', 'spec': None})]
    """
    return [(path, _entry(path, leaf)) for path, leaf in flatten_state(state)]


def _entry(path: str, leaf: Any) -> Any:
    if isinstance(leaf, PythonSavable):
        return {"savable": type(leaf).__name__}
    if is_array(leaf):
        return {
            "shape": [int(size) for size in leaf.shape],
            "dtype": str(leaf.dtype) if is_key_dtype(leaf.dtype) else jnp.dtype(leaf.dtype).name,
            "spec": _layout(leaf),
        }
    if isinstance(leaf, bool | int | float | str):
        return leaf
    raise CheckpointStateError(
        f"the state holds an object of type {type(leaf).__qualname__} at {path!r}; a checkpoint "
        "takes arrays, Python numbers and strings, and objects with `get_state` and `set_state`."
    )


def _layout(leaf: Any) -> list[Any] | None:
    """The mesh axes of each axis, None for an array that is not laid over a mesh."""
    if isinstance(leaf, TensorSpec):
        spec = leaf.partition_spec
    else:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return None
        spec = sharding.spec
    return [list(axes) if isinstance(axes, tuple) else axes for axes in spec]


def write_index_file(*, ckpt_dir: str, index: Index) -> None:
    """Writes the index of a checkpoint.

    Args:
        ckpt_dir: Its directory.
        index: The index.
    """
    with open(os.path.join(ckpt_dir, INDEX), "w", encoding="utf-8") as file:
        json.dump({"version": _VERSION, "index": [list(pair) for pair in index]}, file, indent=0)


def read_index_file(ckpt_dir: str) -> list[tuple[str, Any]]:
    """Reads the index of a checkpoint.

    Args:
        ckpt_dir: Its directory.

    Returns:
        The index that was written.

    Raises:
        DamagedCheckpointError: If there is none, or it is not the text of one.
    """
    path = os.path.join(ckpt_dir, INDEX)
    try:
        content = read_json_file(path)
        if content["version"] != _VERSION:
            raise ValueError(f"it is of version {content['version']}, not {_VERSION}")
        return [(str(path), entry) for path, entry in content["index"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(
            f"{path!r} cannot be read as the index of a checkpoint ({error}). "
            "Restore another step, or with the version of Weft that wrote it.",
            damage=[f"{INDEX}: cannot be read ({error})"],
        ) from error


def read_state_spec(ckpt_dir: str) -> Nested[Any]:
    """What the state of a checkpoint looks like, read without its arrays.

    Args:
        ckpt_dir: The directory of the checkpoint.

    Returns:
        Nested dicts by the parts of each path, with a `TensorSpec` for each array, and the Python
        values themselves. Savable objects are left out.
    """
    tree: dict[str, Any] = {}
    for path, entry in read_index_file(ckpt_dir):
        if isinstance(entry, Mapping) and "shape" not in entry:
            continue
        *above, name = path.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = _tensor_spec(entry) if isinstance(entry, Mapping) else entry
    return tree


def _tensor_spec(entry: Mapping[str, Any]) -> TensorSpec:
    shape, layout = tuple(entry["shape"]), entry["spec"]
    if layout is not None:
        axes = [tuple(axes) if isinstance(axes, list) else axes for axes in layout]
        layout = PartitionSpec(*axes, *[None] * (len(shape) - len(axes)))
    return TensorSpec(shape=shape, dtype=_dtype(entry["dtype"]), mesh_axes=layout)


def _dtype(name: str) -> Any:
    if name.startswith("key<"):
        return next(dtype for dtype in _key_dtypes().values() if str(dtype) == name)
    return jnp.dtype(name)


def key_implementation(dtype: Any) -> str:
    """The name by which `jax.random.key` makes keys of a dtype.

    Args:
        dtype: Of typed keys.

    >>> key_implementation(jax.random.key(0, impl="rbg").dtype)
    'rbg'
    """
    return next(name for name, of_name in _key_dtypes().items() if of_name == dtype)


def _key_dtypes() -> dict[str, Any]:
    """The dtypes of typed keys, by the names of what draws from them."""
    return {
        name: jax.eval_shape(lambda impl=name: jax.random.key(0, impl=impl)).dtype
        for name in ("threefry2x32", "rbg", "unsafe_rbg")
    }


# Comparing.


def check_state_structure(
    ckpt_structure: Index,
    target_structure: Index,
    *,
    validation: CheckpointValidationType = CheckpointValidationType.EXACT,
) -> None:
    """Checks that a checkpoint can be restored to a state.

    Args:
        ckpt_structure: The index of the checkpoint.
        target_structure: The index of the state.
        validation: How alike they must be.

    Raises:
        CheckpointStructureError: If they differ; names paths, shapes and dtypes on both sides.
    """
    saved, wanted = dict(ckpt_structure), dict(target_structure)
    missing = [path for path in wanted if path not in saved]
    unused = [path for path in saved if path not in wanted]
    extra = [] if validation.allows_more else unused
    shapes, dtypes = [], []
    for path in wanted.keys() & saved.keys():
        if _kind(saved[path]) != _kind(wanted[path]):
            shapes.append(path)
        elif _dtype_of(saved[path]) != _dtype_of(wanted[path]) and (
            validation.checks_dtype or "key<" in _dtype_of(saved[path]) + _dtype_of(wanted[path])
        ):
            dtypes.append(path)
    differ = sorted(shapes + dtypes)
    if not (missing or extra or differ):
        return
    lines = [f"the checkpoint and the state differ ({validation.value} is asked for):"]
    lines += _some(
        differ, lambda path: f"checkpoint {_show(saved[path])}, state {_show(wanted[path])}"
    )
    lines += _some(
        missing,
        lambda path: f"state {_show(wanted[path])}, not in the checkpoint.{_near(path, unused)}",
    )
    lines += _some(extra, lambda path: f"checkpoint {_show(saved[path])}, not in the state")
    raise CheckpointStructureError("\n".join([*lines, _mend(missing, extra, shapes, dtypes)]))


def _mend(missing: list, extra: list, shapes: list, dtypes: list) -> str:
    if missing or shapes or not (extra or dtypes):
        return "Restore with the model and learner configs that it was saved with."
    kind = "CONTAINS_STATE" if extra else "EXACT"
    kind += "_UP_TO_DTYPE" if dtypes else ""
    return f"To restore all the same, set the checkpointer's validation to {kind!r}."


def _some(paths: list[str], describe: Callable[[str], str]) -> list[str]:
    """A line for each of the first paths, and one for the others."""
    lines = [f"  {path}: {describe(path)}" for path in paths[:_SHOWN]]
    return lines + ([f"  … {len(paths) - _SHOWN} more"] if len(paths) > _SHOWN else [])


def _near(path: str, unused: list[str]) -> str:
    """Which path of the checkpoint, that nothing else in the state has, may be the same thing."""
    near = similar_names(path, unused)
    return f" Did you mean {near[0]!r}?" if near else ""


def _kind(entry: Any) -> Any:
    """What must be the same whatever the validation: the shape, or that it is no array."""
    if isinstance(entry, Mapping):
        return tuple(entry["shape"]) if "shape" in entry else "savable"
    return type(entry)


def _dtype_of(entry: Any) -> str:
    return entry.get("dtype", "") if isinstance(entry, Mapping) else ""


def _show(entry: Any) -> str:
    if not isinstance(entry, Mapping):
        return f"{type(entry).__name__} {entry!r}"
    if "shape" in entry:
        return f"{entry['dtype']}{list(entry['shape'])}"
    return f"an object ({entry['savable']})"
