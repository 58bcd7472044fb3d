"""The changes to a trainer's config that the config itself names."""

from typing import Any

from weft.config import maybe_instantiate


def apply_config_modifiers(cfg: Any) -> Any:
    """A trainer's config after the changes that its `config_modifiers` stand for.

    Args:
        cfg: The config; it stays as it is.

    Returns:
        A copy without modifiers, changed by them in their order; `cfg` itself if it has none.
    """
    modifiers = getattr(cfg, "config_modifiers", ())
    if not modifiers:
        return cfg
    changed = cfg.clone(config_modifiers=[])
    for modifier in modifiers:
        changed = maybe_instantiate(modifier)(changed)
    return changed
