"""Trees of arrays in safetensors files.

    model.safetensors                       all tensors, by name

    model-00001-of-00002.safetensors        or several files ...
    model-00002-of-00002.safetensors
    model.safetensors.index.json            ... and the file of each tensor

A tensor's name is its path, joined by dots: "decoder.emb.token_emb.weight". Tensors are read one at
a time, sharded ones only in the parts that local devices hold, and written one file at a time.
"""

import contextlib
import difflib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from weft.errors import (
    WeightsMismatchError,
    WeightsReadError,
    WeightsWriteError,
)
from weft.serialization.directory import Directory
from weft.serialization.untrusted import (
    check_local_path,
    is_possible_shape,
    open_file,
    parse_json,
    read_json_file,
)
from weft.typing import ShapeDtype

T = TypeVar("T")

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
_SHOWN = 8
_LARGEST_ITEM_BYTES = 8

# The format's names of dtypes. Of its others, no program packs three bytes of F6 like another.
_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "C64": "complex64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Two in a byte, the first in its lower bits.
_HALF_BYTES = "float4_e2m1fn"


class PendingTensor(NamedTuple):
    """A tensor whose values are computed by `read` when they are written."""

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the values in a file."""
        dtype = jnp.dtype(self.dtype)
        num_bytes = math.prod(self.shape) * dtype.itemsize
        if dtype.name == _HALF_BYTES:
            return num_bytes // 2
        return num_bytes


class StoredTensor(NamedTuple):
    """A tensor in a file; `dtype` is the format's name, such as "BF16"."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


# Names.


def tensor_names(tree: PyTree[T]) -> list[tuple[str, T]]:
    """Returns the arrays of a tree with their names in a file.

    Boxes of axis metadata and NNX variables are named like their values. Raises WeightsWriteError
    if two arrays have the same name.

    >>> tensor_names({"layers": [{"weight": 1}, {"weight": 2}]})
    [('layers.0.weight', 1), ('layers.1.weight', 2)]
    """
    leaves_by_name = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = _name(path)
        if name in leaves_by_name:
            raise WeightsWriteError(
                f"two arrays have the name {name!r}, as when a key contains '.'. "
                "Rename one of them."
            )
        leaves_by_name[name] = leaf
    return list(leaves_by_name.items())


def _name(path: jax.tree_util.KeyPath) -> str:
    if (
        path
        and isinstance(path[-1], jax.tree_util.GetAttrKey)
        and path[-1].name == "value"
    ):
        path = path[:-1]  # what a box holds
    return jax.tree_util.keystr(path, simple=True, separator=".")


# Writing.


def save_safetensors(
    path: str | os.PathLike[str],
    tree: PyTree,
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Writes a tree of arrays to a file, or to several if it is larger than `max_shard_bytes`.

    Args:
        path: the file, such as "model.safetensors"; all files of an earlier call are replaced.
        tree: see `tensor_names`.
        max_shard_bytes: largest size of a file's tensors, unless a single tensor is larger.

    Returns the files that were written, an index last.

    Raises WeightsWriteError if the format cannot hold the tree, or the path is not such a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_safetensors(f"{folder}/model.safetensors", {"w": jnp.ones((2, 3))})
    ...     load_safetensors(f"{folder}/model.safetensors")["w"].shape
    (2, 3)
    """
    tensors = {}
    for name, leaf in tensor_names(tree):
        tensors[name] = _pending(name, leaf)
    return write_tensors(
        path, tensors, metadata=metadata, max_shard_bytes=max_shard_bytes
    )


def _pending(name: str, leaf: object) -> PendingTensor:
    """Returns a leaf as a tensor to write; raises if the format cannot hold it."""
    if not isinstance(
        leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex
    ):
        raise WeightsWriteError(
            f"{name!r} is of type {type(leaf).__qualname__}; a safetensors file holds arrays."
        )
    if isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        raise WeightsWriteError(
            f"{name!r} holds PRNG keys ({leaf.dtype}), which a safetensors file cannot. Give the "
            "parameters alone, such as `nnx.state(model, nnx.Param)`, or `jax.random.key_data`."
        )
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise WeightsWriteError(
            f"{name!r} is spread over several processes, and one of them writes the file. Save a "
            "checkpoint and export that, or gather the array "
            "(`jax.experimental.multihost_utils.process_allgather`)."
        )
    is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
    dtype = leaf.dtype if is_array else np.asarray(leaf).dtype
    if dtype.kind in "OSU":
        content = "objects" if dtype.hasobject else "strings"
        raise WeightsWriteError(
            f"{name!r} is an array of {content}, which a safetensors file does not take. Leave it "
            "out; texts may be in `metadata`."
        )
    if dtype.name not in _NAMES:
        raise WeightsWriteError(
            f"{name!r} has the dtype {dtype}, which a safetensors file does not take. Convert it "
            f"to one of {', '.join(sorted(_NAMES))}."
        )
    if dtype.name == _HALF_BYTES and np.size(leaf) % 2:
        raise WeightsWriteError(
            f"{name!r} has {np.size(leaf)} values of {dtype}, and two fill a byte. Pad it to "
            "an even number, or convert it to float8_e4m3fn."
        )
    return PendingTensor(np.shape(leaf), dtype, lambda: np.asarray(leaf))


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, PendingTensor],
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Writes tensors whose values are computed one file at a time; see `save_safetensors`."""
    check_local_path(path, "path")
    path = Path(path)
    if not path.name.endswith(SUFFIX):
        raise WeightsWriteError(
            f"{str(path)!r} does not end in {SUFFIX!r}. Add it to the name."
        )
    if max_shard_bytes < 1:
        raise WeightsWriteError(
            f"max_shard_bytes={max_shard_bytes} leaves no room; give 1 or more."
        )
    if "__metadata__" in tensors:
        raise WeightsWriteError(
            "a tensor has the name '__metadata__', under which a safetensors file has metadata. "
            "Rename it; texts may be in `metadata`."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Directory(str(path.parent))
    stem = path.name.removesuffix(SUFFIX)
    shards = _shards(tensors, max_shard_bytes)
    is_split = len(shards) > 1
    file_names = []
    file_of_tensor = {}
    total_size = 0
    for i, tensor_names_of_shard in enumerate(shards):
        file_name = (
            f"{stem}-{i + 1:05}-of-{len(shards):05}{SUFFIX}"
            if is_split
            else path.name
        )
        values = {}
        for name in tensor_names_of_shard:
            values[name] = np.asarray(tensors[name].read(), order="C")
            file_of_tensor[name] = file_name
            total_size += tensors[name].nbytes
        _write_file(folder, file_name, values, metadata or {})
        file_names.append(file_name)
    if is_split:
        index = {
            "metadata": {"total_size": total_size},
            "weight_map": file_of_tensor,
        }
        index_name = stem + INDEX_SUFFIX
        folder.write(index_name, json.dumps(index, indent=2) + "\n")
        file_names.append(index_name)
    _remove_earlier(path.parent, stem, keep=file_names)
    return [path.parent / file_name for file_name in file_names]


def _write_file(
    folder: Directory,
    file_name: str,
    values: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Writes one file, in the same way each time.

    The package's own writer orders the metadata at random, and only the user may read its file.
    """
    header: dict[str, dict[str, Any]] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    # Larger items first, so that all are aligned.
    order = sorted(
        values, key=lambda name: (-values[name].dtype.itemsize, name)
    )
    start = 0
    for tensor_name in order:
        value = values[tensor_name]
        num_bytes = len(_packed(value))
        header[tensor_name] = {
            "dtype": _NAMES[jnp.dtype(value.dtype).name],
            "shape": list(value.shape),
            "data_offsets": [start, start + num_bytes],
        }
        start += num_bytes
    text = json.dumps(
        header, ensure_ascii=False, separators=(",", ":")
    ).encode()
    text += b" " * (-len(text) % _LARGEST_ITEM_BYTES)
    with folder.replacing(file_name) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor_name in order:
            file.write(_packed(values[tensor_name]).data)


def _packed(value: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array in a file."""
    native = value if value.dtype.isnative else value.byteswap()
    packed = native.reshape(-1).view(np.uint8)
    if value.dtype.name == _HALF_BYTES:
        return (packed[0::2] & 15) | (packed[1::2] << 4)
    return packed


def _unpacked(packed: np.ndarray, tensor: StoredTensor) -> np.ndarray:
    """Returns the values of the bytes of a tensor."""
    dtype = jnp.dtype(_DTYPES[tensor.dtype])
    if dtype.name == _HALF_BYTES:
        packed = np.stack([packed & 15, packed >> 4], axis=-1)
    return packed.reshape(-1).view(dtype).reshape(tensor.shape)


def _shards(
    tensors: Mapping[str, PendingTensor], max_shard_bytes: int
) -> list[list[str]]:
    """Returns the names of each file's tensors, in order; there is one file at least."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _remove_earlier(folder: Path, stem: str, keep: Sequence[str]) -> None:
    """Removes files of an earlier call under this name that the latest did not write."""
    file_name = re.compile(
        rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(SUFFIX)}(\.index\.json)?"
    )
    for name in os.listdir(folder):
        if file_name.fullmatch(name) and name not in keep:
            (folder / name).unlink()


# Reading.


class TensorFiles:
    """Tensors of a file, or of several with an index, read on demand.

    The files are open while the context manager is active.

    Args:
        path: a file `*.safetensors`, an index `*.safetensors.index.json`, or a folder that has
            `model.safetensors` or its index, or a single such file.

    Raises WeightsReadError if a file is missing or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]):
        check_local_path(path, "path")
        self.path = Path(path)
        self._stack = contextlib.ExitStack()
        self._open_files: dict[Path, Any] = {}
        self._headers: dict[Path, _Header] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for file, names in _files_of(self.path).items():
            stored_tensors = self._tensors_of(file)
            for name in names or ():
                if name not in stored_tensors:
                    raise WeightsReadError(
                        f"{str(file)!r} lacks the tensor {name!r}, which the index says is in it. "
                        "Copy all files of the checkpoint again."
                    )
            # Those that the index does not name count, too: other readers take all of a file.
            for name, tensor in stored_tensors.items():
                if name in self.tensors:
                    raise WeightsReadError(
                        f"the tensor {name!r} is in {self.tensors[name].file.name!r} and in "
                        f"{file.name!r} of {str(file.parent)!r}, and readers take one or the "
                        "other. Copy all files of one checkpoint again."
                    )
                self.tensors[name] = tensor

    def _tensors_of(self, file: Path) -> dict[str, StoredTensor]:
        from safetensors import SafetensorError, safe_open

        try:
            open_file(file).close()  # a FIFO would be waited for
            open_tensors = self._stack.enter_context(
                safe_open(file, framework="np")
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise WeightsReadError(
                f"{str(file)!r} cannot be read as a safetensors file: {error}. Copy it again."
            ) from error
        self._open_files[file] = open_tensors
        stored_tensors = {}
        for name in open_tensors.keys():  # noqa: SIM118 - not a dict
            tensor = open_tensors.get_slice(name)
            shape = tuple(tensor.get_shape())
            if not is_possible_shape(shape, _LARGEST_ITEM_BYTES):
                raise WeightsReadError(
                    f"{name!r} in {str(file)!r} has the shape {list(shape)}, which no array "
                    "can have. Copy the file again."
                )
            stored_tensors[name] = StoredTensor(shape, tensor.get_dtype(), file)
        return stored_tensors

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *exc: object) -> None:
        self._open_files.clear()
        self._stack.close()

    def metadata(self) -> dict[str, str]:
        """Returns the strings stored in the files."""
        metadata = {}
        for file in self._open_files.values():
            metadata.update(file.metadata() or {})
        return metadata

    def read(
        self, name: str, index: tuple[slice, ...] | None = None
    ) -> np.ndarray:
        """Returns the values of a tensor, or of the part at `index`, a slice per axis.

        Raises WeightsReadError for a dtype that NumPy and ml_dtypes lack.
        """
        tensor = self.tensors[name]
        if tensor.dtype not in _DTYPES:
            raise WeightsReadError(
                f"{name!r} in {str(tensor.file)!r} has the dtype {tensor.dtype}; "
                f"{', '.join(_DTYPES)} can be read. Convert the checkpoint to one of them first."
            )
        if tensor.dtype.startswith(
            ("F8", "F4")
        ):  # the package's reader lacks their names
            values = _unpacked(self._bytes(name, tensor.file), tensor)
            if index is not None:
                values = values[index]
            return np.array(values)
        file = self._open_files[tensor.file]
        if index is None or not tensor.shape:
            return file.get_tensor(name)
        return file.get_slice(name)[index]

    def _bytes(self, name: str, path: Path) -> np.ndarray:
        """Returns the bytes of a tensor, mapped from its file; the header was checked before."""
        if path not in self._headers:
            with open_file(path) as file:
                (length,) = struct.unpack("<Q", file.read(8))
                self._headers[path] = _Header(
                    8 + length, parse_json(file.read(length))
                )
        header = self._headers[path]
        begin, end = header.entries[name]["data_offsets"]
        if begin == end:
            return np.empty(0, np.uint8)
        return np.memmap(
            path, np.uint8, "r", header.end + begin, (end - begin,)
        )


class _Header(NamedTuple):
    """The header of a file: the position after it, and the entry of each tensor."""

    end: int
    entries: dict[str, dict[str, Any]]


def _file_in_folder(folder: Path) -> Path:
    """Returns the file, or the index, of the one checkpoint in a folder."""
    for suffix in (SUFFIX, INDEX_SUFFIX):
        path = folder / f"model{suffix}"
        if path.exists():
            return path
    paths = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    if not paths:
        paths = sorted(folder.glob(f"*{SUFFIX}"))
    if len(paths) != 1:
        names = ", ".join(path.name for path in paths) or "no safetensors file"
        raise WeightsReadError(
            f"{str(folder)!r} has {names} in it, and not just one checkpoint of safetensors "
            "files. Give the path of a file, or of an index."
        )
    return paths[0]


def _files_of(path: Path) -> dict[Path, list[str] | None]:
    """Returns the files, each with the tensors to read from it; None for all."""
    if path.is_dir():
        path = _file_in_folder(path)
    if not path.exists():
        raise WeightsReadError(f"there is no file {str(path)!r}.")
    if not path.name.endswith(INDEX_SUFFIX):
        return {path: None}
    files: dict[Path, list[str]] = {}
    try:
        for name, file in read_json_file(path)["weight_map"].items():
            # Only the name: an index of a stranger does not lead out of its folder.
            files.setdefault(path.parent / Path(file).name, []).append(name)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsReadError(
            f"{str(path)!r} cannot be read as the index of safetensors files ({error!r}). Copy it "
            "again."
        ) from error
    missing = [file.name for file in files if not os.path.exists(file)]
    if missing:
        raise WeightsReadError(
            f"{str(path)!r} names files missing from its folder: {', '.join(missing)}. Copy all "
            "files of the checkpoint."
        )
    return dict(files)


def load_safetensors(
    path: str | os.PathLike[str], target: PyTree = None, *, cast: bool = False
) -> PyTree:
    """Reads a tree of arrays.

    Args:
        path: see `TensorFiles`.
        target: a tree of arrays or `jax.ShapeDtypeStruct` with exactly these tensors. Values get
            the target's shardings, if any. None returns nested dicts of NumPy arrays.
        cast: whether to convert values to the target's dtypes if they differ.

    Raises:
        WeightsReadError: if a file is missing or damaged.
        WeightsMismatchError: if names, shapes or dtypes differ; the message lists them.
    """
    with TensorFiles(path) as files:
        if target is None:
            return _nested(
                {name: files.read(name) for name in files.tensors}, files.path
            )
        named_leaves = tensor_names(target)
        check_tensors(files, dict(named_leaves), cast=cast)
        values = [_read_as(files, name, leaf) for name, leaf in named_leaves]
        return jax.tree.unflatten(jax.tree.structure(target), values)


def _nested(values: Mapping[str, np.ndarray], path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parent_keys, last_key = name.split(".")
        node: Any = tree
        for key in parent_keys:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last_key in node:
            raise WeightsMismatchError(
                f"{str(path)!r} has the tensor {name!r} and another one below or above that name, "
                "which no nested dict can. Give a target, or read it with TensorFiles."
            )
        node[last_key] = value
    return tree


def _read_as(files: TensorFiles, name: str, leaf: ShapeDtype) -> jax.Array:
    dtype = jnp.dtype(leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return jnp.asarray(files.read(name).astype(dtype))

    def read_part(index: tuple[slice, ...] | None) -> np.ndarray:
        return np.asarray(files.read(name, index), dtype)

    return jax.make_array_from_callback(leaf.shape, sharding, read_part)


# Comparing.


def check_tensors(
    files: TensorFiles,
    wanted: Mapping[str, ShapeDtype],
    *,
    cast: bool = False,
    extra_allowed: Callable[[str], bool] = lambda name: False,
) -> None:
    """Raises WeightsMismatchError unless files have exactly the wanted tensors.

    Args:
        wanted: arrays or their shapes, by name.
        extra_allowed: returns whether the files may have another tensor.
    """
    extra_names = []
    unexpected = []
    for name, stored in files.tensors.items():
        if name not in wanted and not extra_allowed(name):
            extra_names.append(name)
            unexpected.append(f"{name} {list(stored.shape)}")
    missing = []
    shapes = []
    dtypes = []
    for name, leaf in wanted.items():
        shape, dtype = list(leaf.shape), jnp.dtype(leaf.dtype).name
        stored = files.tensors.get(name)
        if stored is None:
            missing.append(f"{name} {shape}{_suggestion(name, extra_names)}")
            continue
        if list(stored.shape) != shape:
            shapes.append(
                f"{name} {list(stored.shape)} in the file, {shape} wanted"
            )
        if not cast and _DTYPES.get(stored.dtype) != dtype:
            dtypes.append(f"{name} {stored.dtype} in the file, {dtype} wanted")
    if not (missing or unexpected or shapes or dtypes):
        return
    lines = [
        f"the tensors of {str(files.path)!r} are not those of the target:",
        *_list_differences("missing", missing),
        *_list_differences("unexpected", unexpected),
        *_list_differences("shape", shapes),
        *_list_differences("dtype", dtypes),
    ]
    if missing or unexpected or shapes:
        lines.append(
            "Give the target of the model that the file was written from."
        )
    else:
        lines.append("Give cast=True to convert them.")
    raise WeightsMismatchError("\n".join(lines))


def _suggestion(name: str, extra_names: list[str]) -> str:
    near_names = difflib.get_close_matches(name, extra_names, n=1)
    if not near_names:
        return ""
    return f"; did you mean {near_names[0]!r}?"


def _list_differences(kind: str, differences: list[str]) -> list[str]:
    """Returns a line for each of the first differences, and one with the number of the others."""
    lines = [f"  {kind}: {difference}" for difference in differences[:_SHOWN]]
    if len(differences) > _SHOWN:
        lines.append(f"  {kind}: … {len(differences) - _SHOWN} more")
    return lines
