"""Config modifiers: changes to a trainer's config, as configs themselves.

Configs for different hardware differ little: in the mesh, rematerialization, the number of
microbatches. A modifier represents such a change for `mesh_rules`, composition and config texts.

    modifier = ChainConfigModifier.default_config().set(
        config_modifiers=[
            MeshShapeModifier.default_config().set(mesh_shape=(-1, 8)),
            RematSpecModifier.default_config().set(
                remat_policies={"model.decoder.transformer.layer": RematSpec(prevent_cse=False)}
            ),
        ]
    )
    cfg = modifier.instantiate()(cfg)

Every modifier changes the given config in place and returns it. A path without a match is an error,
since a change without effect is a mistake.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.config import (
    REQUIRED,
    ConfigBase,
    ConfigModifier,
    ConfigOr,
    Configurable,
    InstantiableConfig,
    Required,
    config_for_function,
    maybe_instantiate,
)
from weft.config.configurable import needs_allow
from weft.errors import ConfigModifierError, UnknownFieldError, did_you_mean
from weft.hierarchy import BaseLayer, MetricAccumulator, Module, RematSpec
from weft.trainer import gradients, mesh
from weft.typing import MeshAxes, PartitionSpec, T


def find_values(cfg: ConfigBase, wanted: Callable[[str, Any], object]) -> dict[str, Any]:
    """Returns by path the values inside a config, itself at "", for which `wanted` returns true."""
    found: dict[str, Any] = {}

    def enter(path: str, value: object, children: list | None) -> list | None:
        if wanted(path, value):
            found[path] = value
        return children

    cfg.visit(visit_fn=lambda path, value: None, enter_fn=enter)
    return found


def outermost(found: Mapping[str, T]) -> dict[str, T]:
    """Returns the values that are not inside another one, given values of a config by path."""
    below = tuple(f"{path}{separator}" for path in found for separator in ".[")
    return {path: value for path, value in found.items() if not path.startswith(below)}


def _config_at(modifier: ConfigModifier, cfg: ConfigBase, path: str) -> ConfigBase:
    name = type(modifier).__name__
    try:
        found = cfg.get_recursively(path)
    except UnknownFieldError as error:
        raise ConfigModifierError(f"{name} finds nothing at {path!r}: {error}") from None
    if not isinstance(found, ConfigBase):
        raise ConfigModifierError(
            f"{name} expects a config at {path!r}, but found {found!r:.80}; use the path of the "
            "layer, not of its field."
        )
    return found


def _set_field(
    modifier: ConfigModifier, config: ConfigBase, path: str, field: str, value: object
) -> None:
    if field not in config.keys():  # noqa: SIM118 - a config is not a mapping
        kind = getattr(config, "klass", type(config)).__name__
        raise ConfigModifierError(
            f"{type(modifier).__name__} is to set {field!r} of {path!r}, but {kind} has no such "
            f"field. {did_you_mean(field, config.keys())}"
        )
    setattr(config, field, value)


def _set_field_of_layer(
    modifier: ConfigModifier, cfg: ConfigBase, path: str, field: str, value: object
) -> None:
    config: Any = _config_at(modifier, cfg, path)
    made = getattr(config, "klass", type(config))
    if not issubclass(made, BaseLayer) or field in {"klass", *_restricted_fields(made)}:
        raise ConfigModifierError(
            f"{type(modifier).__name__} is to set {field!r} of {path!r}, but it may only set "
            f"layouts and recomputation of layers. Set {field!r} of {made.__name__} in the config "
            "itself."
        )
    _set_field(modifier, config, path, field, value)


def _restricted_fields(made: object) -> frozenset[str]:
    """Returns the fields that only the caller may set, neither a text nor a modifier in it."""
    names = needs_allow(made) if isinstance(made, type) else frozenset()
    return frozenset() if isinstance(names, bool) else names


def apply_config_modifiers(cfg: InstantiableConfig) -> Any:
    """Returns a copy with its `config_modifiers` applied and removed; `cfg` itself without any."""
    modifiers = getattr(cfg, "config_modifiers", ())
    if not modifiers:
        return cfg
    changed = cfg.clone(config_modifiers=[])
    for modifier in modifiers:
        modify = maybe_instantiate(modifier)
        if not callable(modify):
            raise ConfigModifierError(
                f"config_modifiers holds {modifier!r}, which cannot be called with a config. Write "
                "the config of a modifier."
            )
        changed = modify(changed)
    return changed


class ChainConfigModifier(ConfigModifier):
    """Config modifier that applies several modifiers in order."""

    class Config(ConfigModifier.Config):
        config_modifiers: Required[Sequence[ConfigOr[ConfigModifier]]] = REQUIRED

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._modifiers = [maybe_instantiate(modifier) for modifier in cfg.config_modifiers]

    def __call__(self, cfg: InstantiableConfig) -> InstantiableConfig:
        for modifier in self._modifiers:
            cfg = modifier(cfg)
        return cfg


class MeshShapeModifier(ConfigModifier):
    """Config modifier that sets the mesh shape."""

    class Config(ConfigModifier.Config):
        mesh_shape: Required[mesh.MeshShape | mesh.HybridMeshShape] = REQUIRED

    def __call__(self, cfg: InstantiableConfig) -> Any:
        return cfg.set(mesh_shape=self.config.mesh_shape)


class RematSpecModifier(ConfigModifier):
    """Config modifier that sets the rematerialization of layers."""

    class Config(ConfigModifier.Config):
        """Configures a RematSpecModifier.

        Attributes:
            remat_policies: the `remat_spec` by the path of a layer's config, such as
                "model.decoder.transformer.layer".
        """

        remat_policies: Required[dict[str, RematSpec]] = REQUIRED

    def __call__(self, cfg: InstantiableConfig) -> Any:
        for path, spec in self.config.remat_policies.items():
            _set_field_of_layer(self, cfg, path, "remat_spec", spec)
        return cfg


class PartitionSpecModifier(ConfigModifier):
    """Config modifier that sets the sharding of parameters or activations."""

    class Config(ConfigModifier.Config):
        """Configures a PartitionSpecModifier.

        Attributes:
            partition_specs: by the path of a layer's config, such as "model.decoder.emb.token_emb":
                the layout of its main weight, or a dict of layouts by field name, such as
                `{"output_partition_spec": ("data",)}`.
        """

        partition_specs: Required[dict[str, PartitionSpec | MeshAxes | dict[str, Any]]] = REQUIRED

    def __call__(self, cfg: InstantiableConfig) -> Any:
        for path, specs in self.config.partition_specs.items():
            if not isinstance(specs, Mapping):
                specs = {"param_partition_spec": specs}
            for field, spec in specs.items():
                _set_field_of_layer(self, cfg, path, field, spec)
        return cfg


class ModuleConfigModifier(ConfigModifier):
    """Config modifier that replaces one config by another."""

    class Config(ConfigModifier.Config):
        """Configures a ModuleConfigModifier.

        `modification` replaces the config at a path such as
        "model.decoder.transformer.layer.feed_forward".
        """

        target_config: Required[str] = REQUIRED
        modification: Required[Configurable.Config] = REQUIRED

    def __call__(self, cfg: InstantiableConfig) -> Any:
        path = self.config.target_config
        _config_at(self, cfg, path)
        cfg.set_recursively(path, value=self.config.modification)
        return cfg


class ReplaceLayerConfigModifier(ConfigModifier):
    """Config modifier that replaces all configs of a class in a trainer's config.

    Fields common to both, such as `input_dim` and `norm`, are copied from the replaced config,
    except for those in `exclude_keys`.
    """

    class Config(ConfigModifier.Config):
        """Configures a ReplaceLayerConfigModifier.

        Attributes:
            target_cls: class of the configs to replace; those of its subclasses are kept.
            source_config: the replacement, copied for each.
            exclude_keys: fields that keep the value in `source_config`.
        """

        target_cls: Required[type[Module]] = REQUIRED
        source_config: Required[Configurable.Config] = REQUIRED
        exclude_keys: Sequence[str] | None = None

    def __call__(self, cfg: InstantiableConfig) -> Any:
        target = self.config.target_cls
        paths = find_values(cfg, lambda path, x: path and getattr(x, "klass", None) is target)
        if not paths:
            name = getattr(target, "__name__", target)  # a config has no name
            raise ConfigModifierError(
                f"{type(self).__name__} finds no config of {name} to replace."
            )
        for path in reversed(paths):  # nested ones first
            cfg.set_recursively(path, value=self._replacement(cfg.get_recursively(path)))
        return cfg

    def _replacement(self, old: ConfigBase) -> Any:
        new = self.config.source_config.clone()
        left_out = {"klass", *(self.config.exclude_keys or ())}
        common = set(new.keys()) & set(old.keys()) - left_out
        # A text may set these fields of the replaced config, but not of its replacement.
        decided = sorted(common & _restricted_fields(new.klass) - _restricted_fields(old.klass))
        if decided:
            raise ConfigModifierError(
                f"{type(self).__name__} is to copy {', '.join(decided)} from {old.klass.__name__} "
                f"to {new.klass.__name__}, where it has effects outside the run. Set it in "
                f"source_config, and add exclude_keys={decided!r}."
            )
        return new.set(**{name: getattr(old, name) for name in sorted(common)})


class GradientAccumulationModifier(ConfigModifier):
    """Config modifier that splits each batch into microbatches, which run one after another."""

    class Config(ConfigModifier.Config):
        """Configures a GradientAccumulationModifier, which also combines the summaries."""

        grad_acc_steps: Required[int] = REQUIRED
        metric_accumulator: MetricAccumulator.Config = MetricAccumulator.default_config()

    def __call__(self, cfg: InstantiableConfig) -> Any:
        own = self.config
        learner = _config_at(self, cfg, "learner")
        transformation = config_for_function(gradients.with_minibatch_steps).set(
            steps=own.grad_acc_steps, metric_accumulator=own.metric_accumulator
        )
        _set_field(self, learner, "learner", "forward_fn_transformation", transformation)
        return cfg
