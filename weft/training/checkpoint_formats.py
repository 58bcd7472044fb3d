"""File formats of a checkpoint, read as state dicts.

    checkpoint_10           one file: a state dict, packed by `weft.serialization`
    checkpoint_20/          or a directory of Orbax
    checkpoint_30           a file with placeholders for arrays of several processes ...
    checkpoint_30_gda/      ... and these arrays, each a directory in the zarr format

Flax writes all of these; Weft writes the first.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from weft.errors import (
    DamagedBytesError,
    DamagedCheckpointError,
    MissingExtraError,
    MPARestoreDataCorruptedError,
    MPARestoreTargetRequiredError,
)
from weft.serialization import msgpack_restore, to_state_dict

ARRAYS_SUFFIX = "_gda"

_PLACEHOLDER = "//GDAPlaceholder:"
_ORBAX_FILE = "_METADATA"


def is_orbax(path: str) -> bool:
    """Returns whether a path is a complete Orbax directory."""
    return os.path.isfile(os.path.join(path, _ORBAX_FILE))


def read_checkpoint(path: str, target: Any) -> Any:
    """Returns the state dict of a checkpoint, a file or directory.

    Arrays in files of their own are laid out like those of the state dict `target`.

    Raises:
        DamagedCheckpointError: if the files are not as they were written.
        MPARestoreTargetRequiredError: if `target` lacks layouts for arrays of several processes.
        MissingExtraError: if a package of the extra `train` is missing.
    """
    layouts = {
        _name(key): leaf.sharding
        for key, leaf in jax.tree.leaves_with_path(target)
        if getattr(leaf, "sharding", None) is not None
    }
    if os.path.isdir(path):
        return _with_empty_nodes(_read_orbax(path, layouts), target)
    return _with_arrays(_read_file(path), path, None if target is None else layouts)


def _name(key: Any) -> str:
    return jax.tree_util.keystr(key, simple=True, separator="/")


def _step_of(path: str) -> str:
    found = re.search(r"-?\d[\d.]*(e\+?\d+)?$", path)
    return found.group() if found else "unknown"


def _read_file(path: str) -> Any:
    with open(path, "rb") as file:
        data = file.read()
    try:
        return msgpack_restore(data)
    except DamagedBytesError as error:
        raise _damaged(path, str(error)) from error


def _with_arrays(state: Any, path: str, layouts: Mapping[str, Any] | None) -> Any:
    """Replaces placeholders by the arrays of several processes, which have files of their own."""

    def filled(key: Any, leaf: Any) -> Any:
        if not (isinstance(leaf, str) and leaf.startswith(_PLACEHOLDER)):
            return leaf
        if layouts is None:
            raise MPARestoreTargetRequiredError(path, _step_of(path))
        if _name(key) not in layouts:
            raise MPARestoreTargetRequiredError(path, _step_of(path), _name(key))
        directory = os.path.join(path + ARRAYS_SUFFIX, *leaf.removeprefix(_PLACEHOLDER).split("/"))
        return _read_zarr(directory, layouts[_name(key)], _step_of(path))

    return jax.tree.map_with_path(filled, state)


def _read_zarr(directory: str, sharding: Any, step: str) -> jax.Array:
    try:
        import tensorstore
    except ImportError as error:
        raise _missing(directory, "tensorstore", error) from error
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": os.path.abspath(directory)}}

    def result(future: Any) -> Any:
        try:
            return future.result()
        except ValueError as error:
            raise MPARestoreDataCorruptedError(step, directory) from error

    stored = result(tensorstore.open(spec, read=True))  # pyright: ignore[reportAttributeAccessIssue]
    return jax.make_array_from_callback(
        stored.shape, sharding, lambda index: result(stored[index].read())
    )


def _read_orbax(path: str, layouts: Mapping[str, Any]) -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise _missing(path, "orbax-checkpoint", error) from error

    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def restore_args(key: Any, saved: Any) -> Any:
        if type(saved) is not ocp.metadata.ArrayMetadata:
            return ocp.RestoreArgs()
        # Arrays that were not JAX arrays, or that JAX would narrow (float64), become NumPy arrays.
        layout = layouts.get(_name(key), first_device if saved.sharding is not None else None)
        if layout is None or jax.dtypes.canonicalize_dtype(saved.dtype) != saved.dtype:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        layout.shard_shape(saved.shape)  # a layout that does not fit is not damage to the files
        return ocp.ArrayRestoreArgs(sharding=layout)

    def result(read: Any, **kwargs: Any) -> Any:
        try:
            return read(os.path.abspath(path), **kwargs)
        except (KeyError, OSError, ValueError) as error:
            raise _damaged(path, f"{type(error).__name__}: {error}") from error

    if not is_orbax(path):
        raise _damaged(path, f"it is a directory without Orbax's file {_ORBAX_FILE}")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        metadata = result(reader.metadata).item_metadata
        if metadata is None:
            raise _damaged(path, "Orbax does not find the tree in it")
        args = jax.tree.map_with_path(restore_args, metadata.tree)
        return to_state_dict(result(reader.restore, args=ocp.args.PyTreeRestore(restore_args=args)))


def _with_empty_nodes(state: Any, target: Any) -> Any:
    """Restores nodes without leaves, such as `optax.EmptyState`, which Orbax reads as None."""
    if isinstance(state, dict) and isinstance(target, dict):
        return {key: _with_empty_nodes(value, target.get(key)) for key, value in state.items()}
    empty = state is None and isinstance(target, dict) and not target
    return {} if empty else state


def _damaged(path: str, why: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"the checkpoint {path!r} cannot be read ({why}). Copy it again, or restore another one."
    )


def _missing(path: str, package: str, error: ImportError) -> MissingExtraError:
    return MissingExtraError(
        f"reading the checkpoint {path!r} needs the package {package}, which cannot be "
        f"imported ({error}). Install it with `pip install 'weft[train]'`."
    )
