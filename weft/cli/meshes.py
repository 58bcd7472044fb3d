"""`--mesh data=4,model=2` and `--mesh-selector NAME`: the mesh of a run, on the command line."""

import re
from typing import Any

from weft.errors import CommandLineError
from weft.trainer.mesh import select_mesh_config
from weft.trainer.parallelism import MESH_AXIS_NAMES, ParallelismModifier


def parse_mesh(text: str) -> dict[str, int]:
    """Reads the sizes of mesh axes by name.

    Args:
        text: Pairs of a name and a size, one of which may be -1.

    Raises:
        CommandLineError: if it is anything else.

    >>> parse_mesh("data=-1,model=2")
    {'data': -1, 'model': 2}
    """
    pairs = [re.fullmatch(r"\s*(\w+)\s*=\s*(-1|[1-9]\d*)\s*", part) for part in text.split(",")]
    names = [pair[1] for pair in pairs if pair]
    if len(set(names)) < len(pairs):
        raise CommandLineError(
            f"--mesh {text!r} is not a list of different axes with their sizes; write it as "
            "--mesh data=4,model=2."
        )
    return {pair[1]: int(pair[2]) for pair in pairs if pair}


def on_mesh(cfg: Any, *, selector: str | None = None, mesh: str | None = None) -> Any:
    """A trainer's config for the hardware and the mesh that the command line names.

    Args:
        cfg: The config, which may be changed.
        selector: Names the hardware for `mesh_rules`.
        mesh: Sizes of mesh axes. Axes of the config that it does not name get the size 1. If it
            names axes of `ParallelismModifier` that the config does not have, the model is laid
            over all of that modifier's axes.

    Raises:
        CommandLineError: if there are no such axes, or no rule for the hardware.
        ConfigModifierError: if the model cannot be laid over the axes.
    """
    if selector is not None:
        patterns = [pattern for pattern, _ in cfg.mesh_rules or ()]
        if not any(re.fullmatch(pattern, selector) for pattern in patterns):
            raise CommandLineError(
                f"--mesh-selector {selector!r}: no mesh rule of the config is for it. The rules "
                f"are for {', '.join(map(repr, patterns)) or 'nothing'}."
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
            f"--mesh {mesh!r}: there is no axis {', '.join(map(repr, unknown))}. The config's mesh "
            f"has {', '.join(map(repr, names))}; a transformer can be laid over "
            f"{', '.join(map(repr, MESH_AXIS_NAMES))}."
        )
    return ParallelismModifier.default_config().set(**sizes).instantiate()(cfg)
