"""`--mesh data=4,model=2` and `--mesh-selector NAME`: the mesh of a run, on the command line."""

import re
from typing import Any

from weft.errors import CommandLineError
from weft.trainer.mesh import select_mesh_config
from weft.trainer.parallelism import MESH_AXIS_NAMES, ParallelismModifier


def parse_mesh(text: str) -> dict[str, int]:
    """Parses sizes of mesh axes by name; one may be -1.

    Raises:
        CommandLineError: for any other format.

    >>> parse_mesh("data=-1,model=2")
    {'data': -1, 'model': 2}
    """
    pairs = [re.fullmatch(r"\s*(\w+)\s*=\s*(-1|[1-9]\d*)\s*", part) for part in text.split(",")]
    names = [pair[1] for pair in pairs if pair]
    if len(set(names)) < len(pairs):
        raise CommandLineError(
            f"--mesh {text!r} is not a list of distinct axes with their sizes; write it as "
            "--mesh data=4,model=2."
        )
    return {pair[1]: int(pair[2]) for pair in pairs if pair}


def on_mesh(cfg: Any, *, selector: str | None = None, mesh: str | None = None) -> Any:
    """Applies the hardware and mesh of the command line to a trainer's config.

    Args:
        mesh: Sizes of mesh axes; other axes of the config get the size 1. If it names axes of
            `ParallelismModifier` that the config lacks, the model is sharded over all of that
            modifier's axes.

    Raises:
        CommandLineError: for unknown axes, or hardware without a rule.
        ConfigModifierError: if the model cannot be sharded over the axes.
    """
    if selector is not None:
        patterns = [pattern for pattern, _ in cfg.mesh_rules or ()]
        if not any(re.fullmatch(pattern, selector) for pattern in patterns):
            raise CommandLineError(
                f"--mesh-selector {selector!r}: no mesh rule of the config matches. The rules "
                f"match {', '.join(map(repr, patterns)) or 'nothing'}."
            )
        select_mesh_config(cfg, mesh_selector=selector)
    if mesh is None:
        return cfg
    sizes = parse_mesh(mesh)
    names = tuple(cfg.mesh_axis_names)
    if sizes.keys() <= set(names):
        return cfg.set(mesh_shape=tuple(sizes.get(name, 1) for name in names))
    unknown = sorted(sizes.keys() - set(MESH_AXIS_NAMES))
    if unknown:
        raise CommandLineError(
            f"--mesh {mesh!r}: there is no axis {', '.join(map(repr, unknown))}. The config's "
            f"mesh has {', '.join(map(repr, names))}; a transformer can be sharded over "
            f"{', '.join(map(repr, MESH_AXIS_NAMES))}."
        )
    return ParallelismModifier.default_config().set(**sizes).instantiate()(cfg)
