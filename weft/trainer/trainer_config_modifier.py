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


def find_values(
    cfg: ConfigBase, predicate: Callable[[str, Any], object]
) -> dict[str, Any]:
    """Returns by path the values inside a config, itself at "", for which `predicate` is true."""
    values: dict[str, Any] = {}

    def enter(path: str, value: object, children: list | None) -> list | None:
        if predicate(path, value):
            values[path] = value
        return children

    cfg.visit(visit_fn=lambda path, value: None, enter_fn=enter)
    return values


def outermost(values: Mapping[str, T]) -> dict[str, T]:
    """Returns the values that are not inside another one, given values of a config by path."""
    prefixes: list[str] = []  # of paths inside one of the values
    for path in values:
        prefixes += [f"{path}.", f"{path}["]
    return {
        path: x
        for path, x in values.items()
        if not path.startswith(tuple(prefixes))
    }


def _config_at(
    modifier: ConfigModifier, cfg: ConfigBase, path: str
) -> ConfigBase:
    name = type(modifier).__name__
    try:
        value = cfg.get_recursively(path)
    except UnknownFieldError as error:
        raise ConfigModifierError(
            f"{name} finds nothing at {path!r}: {error}"
        ) from None
    if not isinstance(value, ConfigBase):
        raise ConfigModifierError(
            f"{name} expects a config at {path!r}, but found {value!r:.80}; use the path of the "
            "layer, not of its field."
        )
    return value


def _set_field(
    modifier: ConfigModifier,
    config: ConfigBase,
    path: str,
    field: str,
    value: object,
) -> None:
    if field not in config.keys():  # noqa: SIM118 - a config is not a mapping
        kind = getattr(config, "klass", type(config)).__name__
        raise ConfigModifierError(
            f"{type(modifier).__name__} is to set {field!r} of {path!r}, but {kind} has no such "
            f"field. {did_you_mean(field, config.keys())}"
        )
    setattr(config, field, value)


def _set_field_of_layer(
    modifier: ConfigModifier,
    cfg: ConfigBase,
    path: str,
    field: str,
    value: object,
) -> None:
    config = _config_at(modifier, cfg, path)
    cls = getattr(config, "klass", type(config))
    if not issubclass(cls, BaseLayer) or field in {
        "klass",
        *_restricted_fields(cls),
    }:
        raise ConfigModifierError(
            f"{type(modifier).__name__} is to set {field!r} of {path!r}, but it may only set "
            f"layouts and recomputation of layers. Set {field!r} of {cls.__name__} in the config "
            "itself."
        )
    _set_field(modifier, config, path, field, value)


def _restricted_fields(cls: object) -> frozenset[str]:
    """Returns the fields that only the caller may set, neither a text nor a modifier in it."""
    if not isinstance(cls, type):
        return frozenset()
    names = needs_allow(cls)
    if isinstance(names, bool):
        return frozenset()
    return names


def apply_config_modifiers(cfg: InstantiableConfig) -> Any:
    """Returns a copy with its `config_modifiers` applied and removed; `cfg` itself without any."""
    modifiers = getattr(cfg, "config_modifiers", ())
    if not modifiers:
        return cfg
    modified = cfg.clone(config_modifiers=[])
    for modifier_config in modifiers:
        modifier = maybe_instantiate(modifier_config)
        if not callable(modifier):
            raise ConfigModifierError(
                f"config_modifiers holds {modifier_config!r}, which cannot be called with a "
                "config. Write the config of a modifier."
            )
        modified = modifier(modified)
    return modified


class ChainConfigModifier(ConfigModifier):
    """Config modifier that applies several modifiers in order."""

    class Config(ConfigModifier.Config):
        config_modifiers: Required[Sequence[ConfigOr[ConfigModifier]]] = (
            REQUIRED
        )

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._modifiers = [
            maybe_instantiate(modifier) for modifier in cfg.config_modifiers
        ]

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
        """Configures a RematSpecModifier."""

        remat_policies: Required[dict[str, RematSpec]] = REQUIRED
        """The `remat_spec` by the path of a layer's config, such as
        "model.decoder.transformer.layer"."""

    def __call__(self, cfg: InstantiableConfig) -> Any:
        for path, spec in self.config.remat_policies.items():
            _set_field_of_layer(self, cfg, path, "remat_spec", spec)
        return cfg


class PartitionSpecModifier(ConfigModifier):
    """Config modifier that sets the sharding of parameters or activations."""

    class Config(ConfigModifier.Config):
        """Configures a PartitionSpecModifier."""

        partition_specs: Required[
            dict[str, PartitionSpec | MeshAxes | dict[str, Any]]
        ] = REQUIRED
        """By the path of a layer's config, such as "model.decoder.emb.token_emb": the layout of its
        main weight, or a dict of layouts by field name, such as `{"output_partition_spec":
        ("data",)}`."""

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
        """Configures a ReplaceLayerConfigModifier."""

        target_cls: Required[type[Module]] = REQUIRED
        """Class of the configs to replace; those of its subclasses are kept."""
        source_config: Required[Configurable.Config] = REQUIRED
        """The replacement, copied for each."""
        exclude_keys: Sequence[str] | None = None
        """Fields that keep the value in `source_config`."""

    def __call__(self, cfg: InstantiableConfig) -> Any:
        target_cls = self.config.target_cls

        def is_target(path: str, value: object) -> bool:
            return path != "" and getattr(value, "klass", None) is target_cls

        paths = list(find_values(cfg, is_target))
        if not paths:
            name = getattr(
                target_cls, "__name__", target_cls
            )  # a config has no name
            raise ConfigModifierError(
                f"{type(self).__name__} finds no config of {name} to replace."
            )
        for path in reversed(paths):  # nested ones first
            cfg.set_recursively(
                path, value=self._replacement(cfg.get_recursively(path))
            )
        return cfg

    def _replacement(self, replaced: ConfigBase) -> ConfigBase:
        """Returns a copy of the replacement, with the fields that are common to both."""
        new = self.config.source_config.clone()
        copied_names = set(new.keys()) & set(replaced.keys())
        copied_names -= {"klass", *(self.config.exclude_keys or ())}
        # A text may set these fields of the replaced config, but not of its replacement.
        newly_restricted = _restricted_fields(new.klass) - _restricted_fields(
            replaced.klass
        )
        refused_names = sorted(copied_names & newly_restricted)
        if refused_names:
            raise ConfigModifierError(
                f"{type(self).__name__} is to copy {', '.join(refused_names)} from "
                f"{replaced.klass.__name__} to {new.klass.__name__}, where it has effects outside "
                f"the run. Set it in source_config, and add exclude_keys={refused_names!r}."
            )
        for name in sorted(copied_names):
            setattr(new, name, getattr(replaced, name))
        return new


class GradientAccumulationModifier(ConfigModifier):
    """Config modifier that splits each batch into microbatches, which run one after another."""

    class Config(ConfigModifier.Config):
        """Configures a GradientAccumulationModifier, which also combines the summaries."""

        grad_acc_steps: Required[int] = REQUIRED
        max_rows_per_device: int | None = None
        """Most rows that a device has at a time; with fewer devices than before, there are more
        steps instead of more rows. None for no limit."""
        metric_accumulator: MetricAccumulator.Config = (
            MetricAccumulator.default_config()
        )

    def __call__(self, cfg: InstantiableConfig) -> Any:
        learner = _config_at(self, cfg, "learner")
        transformation = config_for_function(
            gradients.with_minibatch_steps
        ).set(
            steps=self.config.grad_acc_steps,
            metric_accumulator=self.config.metric_accumulator,
            max_rows_per_device=self.config.max_rows_per_device,
            batch_axis_names=getattr(cfg, "batch_axis_names", "data"),
        )
        _set_field(
            self,
            learner,
            "learner",
            "forward_fn_transformation",
            transformation,
        )
        return cfg
