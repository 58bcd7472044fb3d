"""Texts about the state that a run writes into its directory, one line per array.

`trainer_state_tree.txt` has the shape, dtype and mesh axes of each array of the state, and
`model_analysis.txt` the shape, the number of elements and the initializer of each parameter.
"""

import logging
import math

from weft.errors import WeftError
from weft.hierarchy.base_layer import BaseLayer
from weft.serialization.directory import Directory
from weft.trainer.optimizers.base import leaves_by_path, path_name
from weft.trainer.state import TrainerState

logger = logging.getLogger(__name__)

STATE_TREE_FILE = "trainer_state_tree.txt"
MODEL_ANALYSIS_FILE = "model_analysis.txt"


def write(directory: str, specs: TrainerState, model: BaseLayer) -> None:
    """Writes both texts; a warning says so if the file system refuses."""
    run = Directory(directory)
    try:
        run.write(STATE_TREE_FILE, state_tree_text(specs), sync=False)
        run.write(MODEL_ANALYSIS_FILE, model_analysis_text(model), sync=False)
    except (OSError, WeftError) as error:
        logger.warning(
            "%s: the state is not described there: %s", directory, error
        )


def state_tree_text(specs: TrainerState) -> str:
    """Returns a line for each array of the state, in order of the tree."""
    lines: list[str] = []
    for path, spec in leaves_by_path(specs).items():
        lines.append(
            f"{path_name(path)}: {spec.dtype}{list(spec.shape)} {spec.partition_spec}"
        )
    return "\n".join(lines) + "\n"


def model_analysis_text(model: BaseLayer) -> str:
    """Returns a line for each parameter, and the number of all their elements."""
    specs = model.create_parameter_specs_recursively()
    lines: list[str] = []
    total = 0
    for path, spec in leaves_by_path(specs).items():
        name = path_name(path)
        size = math.prod(spec.shape)
        total += size
        line = f"{name}: {list(spec.shape)}, {size:,} elements"
        if spec.initializer is not None:
            _, _, last_name = name.rpartition("/")
            line += f", {spec.initializer.debug_string(name=last_name, axes=spec.fan_axes)}"
        lines.append(line)
    lines.append(f"total: {total:,} elements")
    return "\n".join(lines) + "\n"
