"""Config modifiers: changes to a trainer's config that are values themselves.

What differs from one kind of hardware to another is little: the mesh, what is computed again in the
backward pass, in how many microbatches. A modifier holds such a change, so that `mesh_rules` can
name it, several can be put together, and a config's text shows them.

    modifier = ChainConfigModifier.default_config().set(
        config_modifiers=[
            MeshShapeModifier.default_config().set(mesh_shape=(-1, 8)),
            RematSpecModifier.default_config().set(
                remat_policies={"model.decoder.transformer.layer": RematSpec(prevent_cse=False)}
            ),
        ]
    )
    cfg = modifier.instantiate()(cfg)

Every modifier changes the config that it is given, and returns it. A path that leads nowhere is an
error: a change that does nothing was not meant.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from weft.config import (
    REQUIRED,
    ConfigBase,
    ConfigModifier,
    ConfigOr,
    Configurable,
    InstantiableConfig,
    Required,
    config_class,
    config_for_function,
    maybe_instantiate,
)
from weft.config.configurable import needs_allow
from weft.config.names import did_you_mean
from weft.errors import ConfigModifierError, UnknownFieldError
from weft.hierarchy.base_layer import BaseLayer, RematSpec
from weft.hierarchy.metrics import MetricAccumulator
from weft.hierarchy.module import Module
from weft.trainer.gradient_accumulation import with_minibatch_steps
from weft.trainer.mesh import HybridMeshShape, MeshShape
from weft.typing import MeshAxes, PartitionSpec


def _config_at(modifier: ConfigModifier, cfg: Any, path: str) -> ConfigBase:
    """The config at a path of a trainer's config."""
    name = type(modifier).__name__
    try:
        found = cfg.get_recursively(path)
    except UnknownFieldError as error:
        raise ConfigModifierError(f"{name} finds nothing at {path!r}: {error}") from None
    if not isinstance(found, ConfigBase):
        raise ConfigModifierError(
            f"{name} looks for a config at {path!r}, where there is {found!r:.80}; name the layer "
            "and not its field."
        )
    return found


def _set_field(modifier: ConfigModifier, config: Any, path: str, field: str, value: Any) -> None:
    if field not in config.keys():  # noqa: SIM118 - a config is no mapping
        kind = getattr(config, "klass", type(config)).__name__
        raise ConfigModifierError(
            f"{type(modifier).__name__} is to set {field!r} of {path!r}, and {kind} has no such "
            f"field. {did_you_mean(field, config.keys())}"
        )
    setattr(config, field, value)


def _set_field_of_layer(
    modifier: ConfigModifier, cfg: Any, path: str, field: str, value: Any
) -> None:
    config: Any = _config_at(modifier, cfg, path)
    made = getattr(config, "klass", type(config))
    if not issubclass(made, BaseLayer) or field in {"klass", *_held_back(made)}:
        raise ConfigModifierError(
            f"{type(modifier).__name__} is to set {field!r} of {path!r}, and sets layouts and "
            f"recomputation of layers only. Set {field!r} of {made.__name__} in the config itself."
        )
    _set_field(modifier, config, path, field, value)


def _held_back(made: Any) -> frozenset[str]:
    """The fields that whoever runs a config decides, not a text, nor a modifier in it."""
    names = needs_allow(made) if isinstance(made, type) else frozenset()
    return frozenset() if isinstance(names, bool) else names


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


class ChainConfigModifier(ConfigModifier):
    """Several modifiers, one after the other."""

    @config_class
    class Config(ConfigModifier.Config):
        """Configures a ChainConfigModifier.

        Attributes:
            config_modifiers: the modifiers, the first one first.
        """

        config_modifiers: Required[Sequence[ConfigOr[ConfigModifier]]] = REQUIRED

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._modifiers = [maybe_instantiate(modifier) for modifier in cfg.config_modifiers]

    def __call__(self, cfg: InstantiableConfig) -> InstantiableConfig:
        for modifier in self._modifiers:
            cfg = modifier(cfg)
        return cfg


class MeshShapeModifier(ConfigModifier):
    """Sets the mesh shape."""

    @config_class
    class Config(ConfigModifier.Config):
        """Configures a MeshShapeModifier.

        Attributes:
            mesh_shape: the number of devices along each axis of the mesh.
        """

        mesh_shape: Required[MeshShape | HybridMeshShape] = REQUIRED

    def __call__(self, cfg: Any) -> Any:
        return cfg.set(mesh_shape=self.config.mesh_shape)


class RematSpecModifier(ConfigModifier):
    """Sets what layers compute again in the backward pass."""

    @config_class
    class Config(ConfigModifier.Config):
        """Configures a RematSpecModifier.

        Attributes:
            remat_policies: the `remat_spec` of layers, by the paths of their configs, such as
              "model.decoder.transformer.layer".
        """

        remat_policies: Required[dict[str, RematSpec]] = REQUIRED

    def __call__(self, cfg: Any) -> Any:
        for path, spec in self.config.remat_policies.items():
            _set_field_of_layer(self, cfg, path, "remat_spec", spec)
        return cfg


class PartitionSpecModifier(ConfigModifier):
    """Sets how parameters, or activations, lie over the mesh."""

    @config_class
    class Config(ConfigModifier.Config):
        """Configures a PartitionSpecModifier.

        Attributes:
            partition_specs: by the paths of layers' configs, such as
              "model.decoder.emb.token_emb", the layout of the layer's main weight, or a dict of
              layouts by the names of its fields, such as `{"output_partition_spec": ("data",)}`.
        """

        partition_specs: Required[dict[str, PartitionSpec | MeshAxes | dict[str, Any]]] = REQUIRED

    def __call__(self, cfg: Any) -> Any:
        for path, specs in self.config.partition_specs.items():
            if not isinstance(specs, Mapping):
                specs = {"param_partition_spec": specs}
            for field, spec in specs.items():
                _set_field_of_layer(self, cfg, path, field, spec)
        return cfg


class ModuleConfigModifier(ConfigModifier):
    """Puts another config in the place of one."""

    @config_class
    class Config(ConfigModifier.Config):
        """Configures a ModuleConfigModifier.

        Attributes:
            target_config: the path of the config to replace, such as
              "model.decoder.transformer.layer.feed_forward".
            modification: what is put there.
        """

        target_config: Required[str] = REQUIRED
        modification: Required[Configurable.Config] = REQUIRED

    def __call__(self, cfg: Any) -> Any:
        path = self.config.target_config
        _config_at(self, cfg, path)
        cfg.set_recursively(path, value=self.config.modification)
        return cfg


class ReplaceLayerConfigModifier(ConfigModifier):
    """Puts a config in the place of every config of a class, wherever in the trainer it is.

    Fields that both have carry over from what is replaced, as `input_dim` and `norm` do, but for
    those that are left out by name: these are as in the source.
    """

    @config_class
    class Config(ConfigModifier.Config):
        """Configures a ReplaceLayerConfigModifier.

        Attributes:
            target_cls: the class whose configs are replaced; those of its subclasses are not.
            source_config: what is put in their place, a copy in each.
            exclude_keys: fields that do not carry over.
        """

        target_cls: Required[type[Module]] = REQUIRED
        source_config: Required[Configurable.Config] = REQUIRED
        exclude_keys: Sequence[str] | None = None

    def __call__(self, cfg: Any) -> Any:
        target = self.config.target_cls
        paths: list[str] = []

        def enter(path: str, value: Any, children: list | None) -> list | None:
            if path and getattr(value, "klass", None) is target:
                paths.append(path)
            return children

        cfg.visit(visit_fn=lambda path, value: None, enter_fn=enter)
        if not paths:
            raise ConfigModifierError(
                f"{type(self).__name__} finds no config of {target.__name__} to replace."
            )
        for path in reversed(paths):  # what lies inside of another is replaced before it
            cfg.set_recursively(path, value=self._replacement(cfg.get_recursively(path)))
        return cfg

    def _replacement(self, old: Any) -> Any:
        new = self.config.source_config.clone()
        left_out = {"klass", *(self.config.exclude_keys or ())}
        common = set(new.keys()) & set(old.keys()) - left_out
        # A text sets these fields of what is replaced, but not of what replaces it.
        decided = sorted(common & _held_back(new.klass) - _held_back(old.klass))
        if decided:
            raise ConfigModifierError(
                f"{type(self).__name__} is to carry {', '.join(decided)} over from "
                f"{old.klass.__name__} to {new.klass.__name__}, where it acts outside of the run. "
                f"Set it in source_config, and say exclude_keys={decided!r}."
            )
        return new.set(**{name: getattr(old, name) for name in sorted(common)})


class GradientAccumulationModifier(ConfigModifier):
    """Cuts each batch into microbatches, which are run one after the other."""

    @config_class
    class Config(ConfigModifier.Config):
        """Configures a GradientAccumulationModifier.

        Attributes:
            grad_acc_steps: the number of microbatches.
            metric_accumulator: puts their summaries together.
        """

        grad_acc_steps: Required[int] = REQUIRED
        metric_accumulator: MetricAccumulator.Config = MetricAccumulator.default_config()

    def __call__(self, cfg: Any) -> Any:
        own = self.config
        learner = _config_at(self, cfg, "learner")
        transformation = config_for_function(with_minibatch_steps).set(
            steps=own.grad_acc_steps, metric_accumulator=own.metric_accumulator
        )
        _set_field(self, learner, "learner", "forward_fn_transformation", transformation)
        return cfg
