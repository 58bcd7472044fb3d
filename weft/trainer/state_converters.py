"""Converters of states: parts of a state, other names, other models, other lengths."""

import enum
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from weft.config import REQUIRED, InstantiableConfig, Required, config_class, maybe_instantiate
from weft.errors import StateBuilderError
from weft.trainer.builder_base import Builder, Converter
from weft.trainer.checkpoint_index import flatten_state
from weft.trainer.mesh import build_mesh, named_sharding
from weft.trainer.model import build_model
from weft.trainer.rules_by_kind import rules_of
from weft.trainer.state import parameter_specs
from weft.trainer.train_step import TrainerState


class MergeStateSelection(enum.StrEnum):
    """Source of a leaf: the storage, under the same path, or the target, initialized as usual."""

    SOURCE = "source"
    TARGET = "target"


class MergeStateConverter(Converter):
    """Converter that takes leaves from the storage by path, under the same or other names.

    Only these leaves are read.
    """

    @config_class
    class Config(Converter.Config):
        r"""Configures a MergeStateConverter.

        Attributes:
            selection_regexes: pairs of a regular expression for whole paths in the target, such as
                "model/decoder/.*", and the source of these leaves: a `MergeStateSelection`, or
                their paths in the storage, where "\1" is replaced by the first group of the match.
                The first matching pair counts; leaves without a match are initialized as usual.
        """

        selection_regexes: list[tuple[str, str | MergeStateSelection]] = []

    def target_state_type(self) -> Builder.StateType:
        return Builder.StateType.TENSOR_SPECS

    def target_to_source(self, target: Builder.State) -> tuple[Builder.State, Any]:
        leaves = dict(flatten_state(target.trainer_state))
        taken = {path: at for path in leaves if (at := self._source_path(path)) is not None}
        if not taken:
            raise StateBuilderError(
                f"{self.path()}: no path of the state matches one of selection_regexes="
                f"{self.config.selection_regexes!r}; there are {', '.join(list(leaves)[:5])}, … "
                "Write expressions for whole paths."
            )
        source = _nested({at: leaves[path] for path, at in taken.items()}, self.path())
        return Builder.State(target.step, source), (target, taken)

    def _source_path(self, path: str) -> str | None:
        for regex, selected in self.config.selection_regexes:
            match = re.fullmatch(regex, path)
            if match is not None:
                if selected == MergeStateSelection.TARGET:
                    return None
                return path if selected == MergeStateSelection.SOURCE else match.expand(selected)
        return None

    def source_to_target(self, source: Builder.State, aux: Any) -> Builder.State:
        target, taken = aux
        read = dict(flatten_state(source.trainer_state))
        return _with_values(target, {path: read[at] for path, at in taken.items()}, source.step)


class EmaParamsConverter(Converter):
    """Converter that uses a run's moving average of parameters as the model's parameters."""

    def target_state_type(self) -> Builder.StateType:
        return Builder.StateType.TENSOR_SPECS

    def target_to_source(self, target: Builder.State) -> tuple[Builder.State, Any]:
        averages = {"ema": {"ema": target.trainer_state.model}}
        source = TrainerState(prng_key={}, model={}, learner=averages)
        return Builder.State(target.step, source), target

    def source_to_target(self, source: Builder.State, aux: Any) -> Builder.State:
        model = flatten_state({"model": source.trainer_state.learner["ema"]["ema"]})
        return _with_values(aux, dict(model), source.step)


class BaseConverterFromPretrainedModel(Converter):
    """Base class of converters from the model of another trainer's config."""

    @config_class
    class Config(Converter.Config):
        """Configures a BaseConverterFromPretrainedModel.

        Attributes:
            source_trainer_config: makes the config of the trainer that saved the checkpoint, or a
                function that does.
            mesh_shape: shape of the mesh that its arrays are read onto; None for the run's mesh.
        """

        source_trainer_config: Required[InstantiableConfig] = REQUIRED
        mesh_shape: Sequence[int] | None = None
        mesh_axis_names: Sequence[str] | None = None

    def target_state_type(self) -> Builder.StateType:
        return Builder.StateType.TENSOR_SPECS

    def target_to_source(self, target: Builder.State) -> tuple[Builder.State, Any]:
        source = TrainerState(prng_key={}, model=self._source_model(), learner={})
        return Builder.State(target.step, source), target

    def _source_model(self) -> Any:
        """Returns shapes, dtypes and layouts of the source's model."""
        cfg = self.config
        made: Any = maybe_instantiate(cfg.source_trainer_config)
        trainer_cfg: Any = made() if callable(made) else made
        mesh = jax.sharding.get_mesh()
        if cfg.mesh_shape is not None:
            mesh = build_mesh(cfg.mesh_shape, cfg.mesh_axis_names or trainer_cfg.mesh_axis_names)
        model: Any = build_model(trainer_cfg)
        specs = dict(flatten_state(parameter_specs(model, rules_of(trainer_cfg).parameters)))
        shaped = {
            path: jax.ShapeDtypeStruct(
                spec.shape, spec.dtype, sharding=named_sharding(mesh, spec.partition_spec, path)
            )
            for path, spec in specs.items()
        }
        return _nested({f"model/{p}": s for p, s in shaped.items()}, self.path()).model


class ModelStateScopeConverter(BaseConverterFromPretrainedModel):
    """Converter that takes the model of another run, or some of its layers under any names."""

    @config_class
    class Config(BaseConverterFromPretrainedModel.Config):
        """Configures a ModelStateScopeConverter.

        Attributes:
            scope: path of a layer, such as "decoder/transformer", in both models; or a mapping from
                paths in this model to paths in the other. None or "" is the whole model.
        """

        scope: str | Mapping[str, str] | None = None

    @property
    def scopes(self) -> dict[str, str]:
        """Mapping from paths in this model to paths in the other."""
        scope = self.config.scope
        if scope is None:
            return {"": ""}
        return {scope: scope} if isinstance(scope, str) else dict(scope)

    def target_to_source(self, target: Builder.State) -> tuple[Builder.State, Any]:
        whole, aux = super().target_to_source(target)
        leaves = dict(flatten_state(whole.trainer_state))
        kept = {}
        for scope in self.scopes.values():
            inside = {p: x for p, x in leaves.items() if _within(p, f"model/{scope}".rstrip("/"))}
            if not inside:
                raise StateBuilderError(
                    f"{self.path()}: the model of source_trainer_config has no layer {scope!r}; "
                    f"its parameters are {', '.join(list(leaves)[:5])}, … Use such a path, without "
                    "'model/'."
                )
            kept |= inside
        return Builder.State(target.step, _nested(kept, self.path())), aux

    def source_to_target(self, source: Builder.State, aux: Any) -> Builder.State:
        model = aux.trainer_state.model
        before = dict(flatten_state({"model": model}))
        for target_scope, source_scope in self.scopes.items():
            model = traverse_and_set_target_state_parameters(
                target_state=model,
                target_scope=target_scope,
                source_params=source.trainer_state.model,
                source_scope=source_scope,
            )
        after = dict(flatten_state({"model": model}))
        set_ = {path: x for path, x in after.items() if x is not before[path]}
        return _with_values(aux, set_, source.step)


class PosEmbeddingConverter(BaseConverterFromPretrainedModel):
    """Converter for a model with position tables of another length.

    All parameters are taken. Those below a layer called "pos_emb" are resized along the axes in
    which their shapes differ.
    """

    @config_class
    class Config(BaseConverterFromPretrainedModel.Config):
        """Configures a PosEmbeddingConverter.

        Attributes:
            strategy: "truncate" shortens a longer table; "interpolate" resizes it linearly.
        """

        strategy: Required[str] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Any):
        super().__init__(cfg, parent=parent)
        if cfg.strategy not in ("truncate", "interpolate"):
            raise StateBuilderError(
                f"{self.path()}: strategy={cfg.strategy!r}; expected 'truncate' or 'interpolate'."
            )

    def source_to_target(self, source: Builder.State, aux: Any) -> Builder.State:
        wanted = dict(flatten_state({"model": aux.trainer_state.model}))
        read = dict(flatten_state({"model": source.trainer_state.model}))
        values = {
            path: self._fitted(path, value, wanted[path].shape) if path in wanted else value
            for path, value in read.items()
        }
        return _with_values(aux, values, source.step)

    def _fitted(self, path: str, value: Any, shape: tuple[int, ...]) -> Any:
        if "pos_emb" not in path.split("/") or value.shape == shape or value.ndim != len(shape):
            return value
        if self.config.strategy == "interpolate":
            return jax.image.resize(value, shape, "linear")
        if any(n > m for n, m in zip(shape, value.shape, strict=True)):
            raise StateBuilderError(
                f"{self.path()}: {path!r} is {list(value.shape)} in the checkpoint and "
                f"{list(shape)} here; 'truncate' only shortens tables. Use 'interpolate'."
            )
        return value[tuple(slice(n) for n in shape)]


class PruneEmaStateBuilder(Builder):
    """Builder that drops entries from the moving average that the model does not have."""

    def input_state_type(self) -> Builder.StateType:
        return Builder.StateType.TENSORS

    def __call__(self, state: Builder.State) -> Builder.State:
        of_state = state.trainer_state
        ema = of_state.learner.get("ema")
        if ema is None:
            return state
        known = {path for path, _ in flatten_state(of_state.model)}
        leaves = {p: x for p, x in flatten_state(ema.ema) if p in known}
        pruned = ema._replace(ema=_nested({f"model/{p}": x for p, x in leaves.items()}, "").model)
        learner = {**of_state.learner, "ema": pruned}
        kept = {f"learner/ema/ema/{path}" for path in leaves}
        built = {p for p in state.built_keys if not p.startswith("learner/ema/ema/") or p in kept}
        return Builder.State(state.step, of_state._replace(learner=learner), built)


def traverse_and_set_target_state_parameters(
    *, target_state: Any, target_scope: str, source_params: Any, source_scope: str
) -> Any:
    """Returns a model's parameters, or specs, with those of one layer taken from another model.

    A scope is the path of the layer in the model, with "/", or "" for the whole model.

    Raises:
        StateBuilderError: if a layer does not exist, or has other parameters.
    """
    of_target = {p: x for p, x in flatten_state(target_state) if _within(p, target_scope)}
    of_source = {
        f"{target_scope}{path[len(source_scope) :]}"
        if source_scope
        else _join(target_scope, path): x
        for path, x in flatten_state(source_params)
        if _within(path, source_scope)
    }
    if not target_scope:
        of_source = {path.lstrip("/"): x for path, x in of_source.items()}
    differ = sorted(of_target.keys() ^ of_source.keys())
    if differ or not of_target:
        where = f"{target_scope or 'the model'} (from {source_scope or 'the whole'})"
        raise StateBuilderError(
            f"{where} has other parameters than the source"
            + (f": {', '.join(differ[:5])} are on one side only" if differ else ": none at all")
            + ". Name layers of the same class and config."
        )
    leaves = [of_source.get(path, x) for path, x in flatten_state(target_state)]
    return jax.tree.unflatten(jax.tree.structure(target_state), leaves)


def is_dict(x: Any, has_key: str | None = None) -> bool:
    """Returns whether `x` is a dict, and has a key if one is given.

    >>> is_dict({"weight": 1}, "weight"), is_dict({"bias": 1}, "weight"), is_dict([1])
    (True, False, False)
    """
    return isinstance(x, dict) and (has_key is None or has_key in x)


def _join(scope: str, path: str) -> str:
    return f"{scope}/{path}" if scope else path


def _within(path: str, scope: str) -> bool:
    return not scope or path == scope or path.startswith(f"{scope}/")


def _nested(leaves: Mapping[str, Any], where: str) -> TrainerState:
    """Returns a state of nested dicts from its leaves by path."""
    tree: dict[str, Any] = {name: {} for name in TrainerState._fields}
    for path, leaf in leaves.items():
        *above, name = path.split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        if path.split("/")[0] not in TrainerState._fields or (above and name in node):
            raise StateBuilderError(
                f"{where}: {path!r} is not a path of a state, or is requested twice; expected one "
                f"that begins with one of {', '.join(TrainerState._fields)}."
            )
        node[name] = leaf
    return TrainerState(**tree)


def _with_values(target: Builder.State, values: Mapping[str, Any], step: int) -> Builder.State:
    """Returns the target with some leaves replaced, each in its dtype and layout there."""
    wanted = flatten_state(target.trainer_state)
    known = dict(wanted)
    for path, value in values.items():
        if path not in known or tuple(value.shape) != tuple(known[path].shape):
            here = "nothing" if path not in known else list(known[path].shape)
            raise StateBuilderError(
                f"{path!r} is {list(value.shape)} in the checkpoint, of "
                f"{math.prod(value.shape):,} elements, and {here} in this run. Select parts with "
                "the same shapes in both, or convert it."
            )
    leaves = [_like(values[path], leaf) if path in values else leaf for path, leaf in wanted]
    state = jax.tree.unflatten(jax.tree.structure(target.trainer_state), leaves)
    return Builder.State(step, state, target.built_keys | set(values))


def _like(value: Any, leaf: Any) -> Any:
    if value.dtype != leaf.dtype:
        value = value.astype(leaf.dtype)
    return value if leaf.sharding is None else jax.device_put(value, leaf.sharding)
