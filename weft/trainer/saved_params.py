"""Parameters of a run for evaluation, from its checkpoints alone.

The index of a checkpoint has the structure of the state, so neither the model, the optimizer nor
the data is needed. They are the moving average of the parameters if the learner keeps one.
"""

import logging
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from weft.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
)
from weft.hierarchy.lora import adapter_state
from weft.serialization.directory import Directory
from weft.trainer.checkpointer import dirs, index, manifest
from weft.trainer.checkpointer.checkpointer import Checkpointer
from weft.trainer.checkpointer.policy import KeepBest
from weft.trainer.frozen_base import BASE, FrozenBase
from weft.trainer.run_dir import CHECKPOINTS_DIR
from weft.typing import NestedTensor, PyTree

logger = logging.getLogger(__name__)


class SavedParams(NamedTuple):
    """Parameters of a model, nested dicts of arrays, and the step after which they were saved."""

    step: int
    params: NestedTensor


def read_params(
    directory: str, step: int | None = None, like: PyTree | None = None
) -> SavedParams:
    """Reads the parameters of a run.

    Args:
        directory: The directory of the run.
        step: A step that was saved; None for the newest undamaged one.
        like: Arrays with the layouts to use; None for one device.

    Raises:
        CheckpointNotFoundError: If nothing was saved, or not this step.
        DamagedCheckpointError: If the step, or each of them, is damaged.
    """
    base_dir = os.path.join(directory, CHECKPOINTS_DIR)
    steps = list(dirs.step_dirs(base_dir))
    if not steps:
        raise CheckpointNotFoundError(
            f"the run in {directory!r} has not saved a checkpoint yet. Train it longer."
        )
    if step is not None:
        if step not in steps:
            raise dirs.not_found_error(base_dir, step)
        return _read_step(base_dir, step, like)
    for candidate in reversed(steps):
        try:
            return _read_step(base_dir, candidate, like)
        except DamagedCheckpointError as error:
            if candidate == steps[0]:
                raise
            logger.warning(
                "%s The parameters of an earlier step are used instead.", error
            )
    raise AssertionError("the oldest step returns or raises")


def _read_step(base_dir: str, step: int, like: PyTree | None) -> SavedParams:
    ckpt_dir = dirs.build_step_dir(base_dir, step=step)
    spec: Any = index.read_state_spec(ckpt_dir)
    average = spec.get("learner", {}).get("ema", {}).get("ema")
    target = average or spec.get("model", {})
    _check_size(ckpt_dir, target)
    base = None
    saved_paths = [path for path, _ in index.read_index_file(ckpt_dir)]
    if BASE in saved_paths and not average:
        base = FrozenBase()
    if base is not None and like is not None:
        target_like = adapter_state(like)
    else:
        target_like = like
    if target_like is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            target,
            is_leaf=index.is_array,
        )
    else:
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=x.sharding
            ),
            target_like,
        )
    state: dict[str, Any] = {"model": target}
    if average:
        state = {"learner": {"ema": {"ema": target}}}
    if base is not None:
        state[BASE] = base
    cfg = Checkpointer.default_config().set(
        name="checkpointer",
        dir=base_dir,
        validation=index.CheckpointValidationType.CONTAINS_STATE,
    )
    with cfg.instantiate(parent=None) as checkpointer:
        _, restored = checkpointer.restore(step=step, state=state)
    if average:
        return SavedParams(step, restored["learner"]["ema"]["ema"])
    if base is not None:
        return SavedParams(step, base.complete(restored["model"], like))
    return SavedParams(step, restored["model"])


def _check_size(ckpt_dir: str, target: PyTree) -> None:
    """Raises an error if a checkpoint is too small for the arrays that its index names."""
    size = 0
    for leaf in jax.tree.leaves(target, is_leaf=index.is_array):
        if index.is_array(leaf) and not index.is_key_dtype(leaf.dtype):
            itemsize = jax.numpy.dtype(leaf.dtype).itemsize
            size += math.prod(leaf.shape) * itemsize
    size_of_files = 0
    for entry in Directory(ckpt_dir).walk():
        if entry.is_file:
            status = Directory(ckpt_dir).status(entry.name)
            size_of_files += status.st_size if status else 0
    if size > size_of_files:
        raise DamagedCheckpointError(
            f"the index of {ckpt_dir} names arrays of {size:,} bytes, but its files have "
            f"{size_of_files:,}.",
            damage=[f"{index.INDEX}: names more than the files have"],
        )


def best_step(directory: str, best: KeepBest.Config) -> int | None:
    """Returns the saved step with the best value of a metric; None if none was evaluated.

    A checkpoint has the values of the evaluations at its step. Of equal ones the newer counts.
    """
    base_dir = os.path.join(directory, CHECKPOINTS_DIR)
    facts: dict[int, Mapping[str, Any]] = {}
    for step, ckpt_dir in dirs.step_dirs(base_dir).items():
        content = manifest.read_manifest(ckpt_dir, step=step)
        if isinstance(content, manifest.Manifest):
            facts[step] = content.facts
    best_steps = best.clone(n=1).instantiate().kept(facts)
    return next(iter(best_steps), None)
