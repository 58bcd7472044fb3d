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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from weft.errors import WeightsMismatchError, WeightsReadError, WeightsWriteError
from weft.serialization.directory import Directory
from weft.serialization.untrusted import (
    check_local_path,
    is_possible_shape,
    open_file,
    parse_json,
    read_json_file,
)

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
_SHOWN = 8
_LARGEST_ITEM_BYTES = 8

# The format's names of dtypes. Of its others, no program packs three bytes of F6 like another.
_DTYPES = {
    **{"BOOL": "bool", "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "C64": "complex64"},
    **{"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn"},
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
        return num_bytes // 2 if dtype.name == _HALF_BYTES else num_bytes


class StoredTensor(NamedTuple):
    """A tensor in a file; `dtype` is the format's name, such as "BF16"."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


# Names.


def tensor_names(tree: object) -> list[tuple[str, Any]]:
    """Returns the arrays of a tree with their names in a file.

    Boxes of axis metadata and NNX variables are named like their values. Raises WeightsWriteError
    if two arrays have the same name.

    >>> tensor_names({"layers": [{"weight": 1}, {"weight": 2}]})
    [('layers.0.weight', 1), ('layers.1.weight', 2)]
    """
    named = [(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise WeightsWriteError(
            f"two arrays have the name {twice!r}, as when a key contains '.'. Rename one of them."
        )
    return named


def _name(path: jax.tree_util.KeyPath) -> str:
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]  # what a box holds
    return jax.tree_util.keystr(path, simple=True, separator=".")


# Writing.


def save_safetensors(
    path: str | os.PathLike[str],
    tree: object,
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
    tensors = {name: _pending(name, leaf) for name, leaf in tensor_names(tree)}
    return write_tensors(path, tensors, metadata=metadata, max_shard_bytes=max_shard_bytes)


def _pending(name: str, leaf: object) -> PendingTensor:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        raise WeightsWriteError(
            f"{name!r} is of type {type(leaf).__qualname__}; a safetensors file holds arrays."
        )
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
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
    dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
    if np.dtype(dtype).kind in "OSU":
        what = "objects" if np.dtype(dtype).hasobject else "strings"
        raise WeightsWriteError(
            f"{name!r} is an array of {what}, which a safetensors file does not take. Leave it "
            "out; texts may be in `metadata`."
        )
    if jnp.dtype(dtype).name not in _NAMES:
        raise WeightsWriteError(
            f"{name!r} has the dtype {dtype}, which a safetensors file does not take. Convert it "
            f"to one of {', '.join(sorted(_NAMES))}."
        )
    if jnp.dtype(dtype).name == _HALF_BYTES and np.size(leaf) % 2:
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
        raise WeightsWriteError(f"{str(path)!r} does not end in {SUFFIX!r}. Add it to the name.")
    if max_shard_bytes < 1:
        raise WeightsWriteError(
            f"max_shard_bytes={max_shard_bytes} leaves no room; give 1 or more."
        )
    if "__metadata__" in tensors:
        raise WeightsWriteError(
            "a tensor has the name '__metadata__', under which a safetensors file has metadata. "
            "Rename it; texts may be in `metadata`."
        )
    stem = path.name.removesuffix(SUFFIX)
    shards = _shards(tensors, max_shard_bytes)
    names = [path.name]
    if len(shards) > 1:
        names = [f"{stem}-{i + 1:05}-of-{len(shards):05}{SUFFIX}" for i in range(len(shards))]
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Directory(str(path.parent))
    for name, shard in zip(names, shards, strict=True):
        values = {key: np.asarray(tensors[key].read(), order="C") for key in shard}
        _write_file(folder, name, values, metadata or {})
    if len(shards) > 1:
        where = {k: name for name, shard in zip(names, shards, strict=True) for k in shard}
        size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": where}
        names.append(stem + INDEX_SUFFIX)
        folder.write(names[-1], json.dumps(index, indent=2) + "\n")
    _remove_earlier(path.parent, stem, keep=names)
    return [path.parent / name for name in names]


def _write_file(
    folder: Directory, name: str, values: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes one file, in the same way each time.

    The package's own writer orders the metadata at random, and only the user may read its file.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    # Larger items first, so that all are aligned.
    order = sorted(values, key=lambda key: (-values[key].dtype.itemsize, key))
    start = 0
    for key in order:
        value = values[key]
        num_bytes = len(_packed(value))
        header[key] = {
            "dtype": _NAMES[jnp.dtype(value.dtype).name],
            "shape": list(value.shape),
            "data_offsets": [start, start + num_bytes],
        }
        start += num_bytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LARGEST_ITEM_BYTES)
    with folder.replacing(name) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key in order:
            file.write(_packed(values[key]).data)


def _packed(value: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array in a file."""
    in_order = value if value.dtype.isnative else value.byteswap()
    packed = in_order.reshape(-1).view(np.uint8)
    if value.dtype.name == _HALF_BYTES:
        return (packed[0::2] & 15) | (packed[1::2] << 4)
    return packed


def _unpacked(packed: np.ndarray, tensor: StoredTensor) -> np.ndarray:
    """Returns the values of the bytes of a tensor."""
    dtype = jnp.dtype(_DTYPES[tensor.dtype])
    if dtype.name == _HALF_BYTES:
        packed = np.stack([packed & 15, packed >> 4], axis=-1)
    return packed.reshape(-1).view(dtype).reshape(tensor.shape)


def _shards(tensors: Mapping[str, PendingTensor], max_shard_bytes: int) -> list[list[str]]:
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
    own = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(SUFFIX)}(\.index\.json)?")
    for name in os.listdir(folder):
        if own.fullmatch(name) and name not in keep:
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
        self._open: dict[Path, Any] = {}
        self._headers: dict[Path, tuple[int, Any]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for file, names in _files_of(self.path).items():
            there = self._tensors_of(file)
            for name in there if names is None else names:
                if name not in there:
                    raise WeightsReadError(
                        f"{str(file)!r} lacks the tensor {name!r}, which the index says is in it. "
                        "Copy all files of the checkpoint again."
                    )
                self.tensors[name] = there[name]

    def _tensors_of(self, file: Path) -> dict[str, StoredTensor]:
        from safetensors import SafetensorError, safe_open

        try:
            open_file(file).close()  # a FIFO would be waited for
            opened = self._stack.enter_context(safe_open(file, framework="np"))
        except (OSError, ValueError, SafetensorError) as error:
            raise WeightsReadError(
                f"{str(file)!r} cannot be read as a safetensors file: {error}. Copy it again."
            ) from error
        self._open[file] = opened
        found = {}
        for name in opened.keys():  # noqa: SIM118 - not a dict
            part = opened.get_slice(name)
            stored = StoredTensor(tuple(part.get_shape()), part.get_dtype(), file)
            if not is_possible_shape(stored.shape, _LARGEST_ITEM_BYTES):
                raise WeightsReadError(
                    f"{name!r} in {str(file)!r} has the shape {list(stored.shape)}, which no array "
                    "can have. Copy the file again."
                )
            found[name] = stored
        return found

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()
        self._stack.close()

    def metadata(self) -> dict[str, str]:
        """Returns the strings stored in the files."""
        return {k: v for file in self._open.values() for k, v in (file.metadata() or {}).items()}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Returns the values of a tensor, or of the part at `index`, a slice per axis.

        Raises WeightsReadError for a dtype that NumPy and ml_dtypes lack.
        """
        tensor = self.tensors[name]
        if tensor.dtype not in _DTYPES:
            raise WeightsReadError(
                f"{name!r} in {str(tensor.file)!r} has the dtype {tensor.dtype}; "
                f"{', '.join(_DTYPES)} can be read. Convert the checkpoint to one of them first."
            )
        if tensor.dtype.startswith(("F8", "F4")):  # the package's reader lacks their names
            values = _unpacked(self._bytes(name, tensor.file), tensor)
            return np.array(values if index is None else values[index])
        file = self._open[tensor.file]
        if index is None or not tensor.shape:
            return file.get_tensor(name)
        return file.get_slice(name)[index]

    def _bytes(self, name: str, path: Path) -> np.ndarray:
        """Returns the bytes of a tensor, mapped from its file; the header was checked before."""
        if path not in self._headers:
            with open_file(path) as file:
                (length,) = struct.unpack("<Q", file.read(8))
                self._headers[path] = (8 + length, parse_json(file.read(length)))
        start, header = self._headers[path]
        begin, end = header[name]["data_offsets"]
        if begin == end:
            return np.empty(0, np.uint8)
        return np.memmap(path, np.uint8, "r", start + begin, (end - begin,))


def _files_of(path: Path) -> dict[Path, list[str] | None]:
    """Returns the files, each with the tensors to read from it; None for all."""
    if path.is_dir():
        named = [path / f"model{suffix}" for suffix in (SUFFIX, INDEX_SUFFIX)]
        found = [p for p in named if p.exists()][:1] or sorted(path.glob(f"*{INDEX_SUFFIX}"))
        found = found or sorted(path.glob(f"*{SUFFIX}"))
        if len(found) != 1:
            there = ", ".join(p.name for p in found) or "no safetensors file"
            raise WeightsReadError(
                f"{str(path)!r} has {there} in it, and not just one checkpoint of safetensors "
                "files. Give the path of a file, or of an index."
            )
        path = found[0]
    if not path.exists():
        raise WeightsReadError(f"there is no file {str(path)!r}.")
    if not path.name.endswith(INDEX_SUFFIX):
        return {path: None}
    try:
        where = read_json_file(path)["weight_map"]
        files: dict[Path, list[str]] = {}
        for name, file in where.items():
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
    path: str | os.PathLike[str], target: object = None, *, cast: bool = False
) -> Any:
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
            return _nested({name: files.read(name) for name in files.tensors}, files.path)
        named = tensor_names(target)
        check_tensors(files, dict(named), cast=cast)
        values = [_read_as(files, name, leaf) for name, leaf in named]
        return jax.tree.unflatten(jax.tree.structure(target), values)


def _nested(values: Mapping[str, np.ndarray], path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *above, last = name.split(".")
        node: Any = tree
        for part in above:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise WeightsMismatchError(
                f"{str(path)!r} has the tensor {name!r} and another one below or above that name, "
                "which no nested dict can. Give a target, or read it with TensorFiles."
            )
        node[last] = value
    return tree


def _read_as(files: TensorFiles, name: str, leaf: Any) -> jax.Array:
    shape, dtype = leaf.shape, jnp.dtype(leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return jnp.asarray(files.read(name).astype(dtype))

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        return np.asarray(files.read(name, index), dtype)

    return jax.make_array_from_callback(shape, sharding, part)


# Comparing.


def check_tensors(
    files: TensorFiles,
    wanted: Mapping[str, Any],
    *,
    cast: bool = False,
    extra_allowed: Callable[[str], bool] = lambda name: False,
) -> None:
    """Raises WeightsMismatchError unless files have exactly the wanted tensors.

    Args:
        wanted: arrays or their shapes, by name.
        extra_allowed: returns whether the files may have another tensor.
    """
    there = files.tensors
    missing = [name for name in wanted if name not in there]
    extra = [name for name in there if name not in wanted and not extra_allowed(name)]
    both = [name for name in wanted if name in there]
    shapes = [name for name in both if tuple(there[name].shape) != tuple(wanted[name].shape)]
    dtypes = []
    if not cast:
        dtypes = [n for n in both if _DTYPES.get(there[n].dtype) != jnp.dtype(wanted[n].dtype).name]
    if not (missing or extra or shapes or dtypes):
        return
    lines = [f"the tensors of {str(files.path)!r} are not those of the target:"]
    lines += _list_names(
        "missing", missing, lambda n: f"{list(wanted[n].shape)}{_suggestion(n, extra)}"
    )
    lines += _list_names("unexpected", extra, lambda n: f"{list(there[n].shape)}")
    lines += _list_names(
        "shape",
        shapes,
        lambda n: f"{list(there[n].shape)} in the file, {list(wanted[n].shape)} wanted",
    )
    lines += _list_names(
        "dtype",
        dtypes,
        lambda n: f"{there[n].dtype} in the file, {jnp.dtype(wanted[n].dtype).name} wanted",
    )
    if missing or extra or shapes:
        lines.append("Give the target of the model that the file was written from.")
    else:
        lines.append("Give cast=True to convert them.")
    raise WeightsMismatchError("\n".join(lines))


def _suggestion(name: str, extra: list[str]) -> str:
    near = difflib.get_close_matches(name, extra, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _list_names(what: str, names: list[str], describe: Callable[[str], str]) -> list[str]:
    lines = [f"  {what}: {name} {describe(name)}" for name in names[:_SHOWN]]
    return lines + ([f"  {what}: … {len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])
