"""Learners: the update of a model's parameters in a step.

A learner runs the forward pass, differentiates the loss with respect to the parameters that
optimizers update, transforms the gradients, and returns the new parameters. Its state (moments,
counts, moving averages of parameters) is a nested dict; an invocation reads it and adds updates.
"""

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from weft.config import (
    REQUIRED,
    ConfigOr,
    InstantiableConfig,
    Required,
    config_class,
    config_for_function,
    maybe_instantiate,
)
from weft.config.names import did_you_mean
from weft.errors import UpdateRuleError
from weft.hierarchy.base_layer import NestedParameterSpec
from weft.hierarchy.module import Module, nowrap
from weft.trainer.gradients import forward_and_gradients
from weft.trainer.learner_base import LearnerModule
from weft.trainer.loss_scale import DynamicLossScale, unscaled, with_scaled_loss
from weft.trainer.optimizer_base import (
    COUNT_SPEC,
    NestedOptParam,
    NestedOptStateSpec,
    PartitionedGradientTransformation,
    as_partitioned,
    path_name,
    tree_paths,
)
from weft.trainer.optimizer_ema import param_ema
from weft.trainer.optimizer_skipping import all_finite, skips_undefined, tree_where
from weft.trainer.update_transformation import (
    BackwardOutputs,
    ForwardBackwardOutputs,
    ForwardFn,
    Updates,
    as_update_transformation,
    mask_tree,
)
from weft.trainer.variable_stats import variable_stat
from weft.typing import Nested, NestedTensor, Tensor

# For example, runs a forward function over parts of the batch.
ForwardFnTransformation = Callable[[ForwardFn], ForwardFn]


class UpdateType(enum.Enum):
    """Kinds of updates that a parameter receives.

    Attributes:
      NO_UPDATE: none.
      OPTIMIZERS: those of the optimizer.
      STATE_UPDATES: in-place updates by layers, such as moving averages.
      ALL_UPDATES: both.
    """

    NO_UPDATE = "no_update"
    OPTIMIZERS = "optimizers"
    STATE_UPDATES = "state_updates"
    ALL_UPDATES = "all_updates"


def should_update_with_optimizers(update_type: UpdateType | None) -> bool:
    """Returns whether optimizers update such a parameter; None means `NO_UPDATE`.

    >>> should_update_with_optimizers(UpdateType.STATE_UPDATES)
    False
    """
    return update_type in (UpdateType.OPTIMIZERS, UpdateType.ALL_UPDATES)


def should_apply_state_updates(update_type: UpdateType | None) -> bool:
    """Returns whether in-place updates apply to such a parameter; None means `NO_UPDATE`.

    >>> should_apply_state_updates(UpdateType.STATE_UPDATES)
    True
    """
    return update_type in (UpdateType.STATE_UPDATES, UpdateType.ALL_UPDATES)


class BaseLearner(LearnerModule):
    """Interface between a trainer and its learner."""

    def forward_and_backward(
        self, *, fn: ForwardFn, inputs: Any, opt_params: NestedOptParam
    ) -> ForwardBackwardOutputs:
        """Runs the forward pass `fn` on `inputs`, differentiates, and updates the parameters."""
        raise NotImplementedError(f"{type(self).__name__} must define `forward_and_backward`.")

    def update(self, updates: Updates) -> NestedTensor:
        """Returns the parameters after an update, whose deltas are gradients.

        Deltas of parameters that optimizers do not update are masked or ignored.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `update`.")

    @nowrap
    def should_update_with_optimizers(self, model_params: NestedOptParam) -> Nested[bool]:
        """Returns for each parameter, or leaf at its path, whether optimizers update it."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `should_update_with_optimizers`."
        )

    @nowrap
    def handles_undefined_loss(self) -> bool:
        """Returns whether training may continue after a step whose loss is NaN or infinite."""
        return False

    @nowrap
    def handles_undefined_gradients(self, state: Any, model_params: NestedOptParam) -> Nested[bool]:
        """Returns for each parameter whether steps with undefined gradients are skipped for it."""
        return jax.tree.map(lambda _: self.handles_undefined_loss(), model_params)


class Learner(BaseLearner):
    """Learner with one optimizer.

    Its state has the entries "optimizer", "ema" if a moving average of the parameters is kept,
    "undefined_loss_count" if steps with an undefined loss are skipped, and "loss_scale" if the loss
    is scaled.
    """

    @config_class
    class Config(BaseLearner.Config):
        """Configures a Learner.

        Attributes:
          optimizer: config of a function that returns an optimizer, such as optax's, or of an
            `UpdateTransformation`.
          update_rules: pairs of a regular expression, which must match the whole path of a
            parameter, and its kind of updates; the first match counts. Without a match, a parameter
            gets all updates. State of layers (`ParameterSpec.is_state`) is never optimized.
          ema: the moving average of the parameters, kept if its `decay` is not None.
          enable_per_variable_summaries: whether to report statistics of each parameter and its
            gradient; or regular expressions of the paths to report.
          per_variable_stats: the statistics to report: "rms" and others of
            `weft.trainer.variable_stats`.
          ignore_undefined_loss: whether to skip and count steps whose loss or gradients are not
            finite.
          forward_fn_transformation: applied to the forward pass before it is differentiated, such
            as `with_minibatch_steps`, which accumulates gradients.
          loss_scale: scale of the loss during differentiation, for half precision. Steps
            with gradients that are not finite change only the scale.
        """

        optimizer: Required[InstantiableConfig] = REQUIRED
        update_rules: Sequence[tuple[str, UpdateType | None]] = []
        ema: InstantiableConfig = config_for_function(param_ema)
        enable_per_variable_summaries: bool | list[str] = False
        per_variable_stats: Sequence[str] = ("rms",)
        ignore_undefined_loss: bool = False
        forward_fn_transformation: ConfigOr[ForwardFnTransformation] | None = None
        loss_scale: DynamicLossScale.Config | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child("optimizer", as_update_transformation(cfg.optimizer))
        self._loss_scale = maybe_instantiate(cfg.loss_scale)
        self._ema = _ema_or_none(cfg.ema)
        self._forward_fn_transformation = maybe_instantiate(cfg.forward_fn_transformation)
        self._stats = {name: variable_stat(name) for name in cfg.per_variable_stats}

    @nowrap
    def init(self, model_params: NestedOptParam) -> dict[str, Any]:
        state = {"optimizer": self.optimizer.init(self._optimized(model_params))}
        if self._ema is not None:
            state["ema"] = self._ema.init(model_params)
        if self.config.ignore_undefined_loss:
            state["undefined_loss_count"] = jnp.zeros((), jnp.int32)
        if self._loss_scale is not None:
            state["loss_scale"] = self._loss_scale.init()
        return state

    @nowrap
    def create_state_partition_specs(
        self, model_param_specs: NestedParameterSpec
    ) -> dict[str, NestedOptStateSpec]:
        optimized = self._optimized(model_param_specs)
        specs = {"optimizer": self.optimizer.create_state_partition_specs(optimized)}
        if self._ema is not None:
            specs["ema"] = self._ema.partition(model_param_specs)
        if self.config.ignore_undefined_loss:
            specs["undefined_loss_count"] = COUNT_SPEC
        if self._loss_scale is not None:
            specs["loss_scale"] = self._loss_scale.partition()
        return specs

    @nowrap
    def handles_undefined_loss(self) -> bool:
        return self.config.ignore_undefined_loss

    @nowrap
    def handles_undefined_gradients(self, state: Any, model_params: NestedOptParam) -> Nested[bool]:
        handles = (
            self.handles_undefined_loss()
            or self._loss_scale is not None
            or skips_undefined(state["optimizer"])
        )
        return jax.tree.map(lambda _: handles, model_params)

    @nowrap
    def should_update_with_optimizers(self, model_params: NestedOptParam) -> Nested[bool]:
        return jax.tree.map(
            lambda matches, param: matches and not getattr(param, "is_state", False),
            self._matching(should_update_with_optimizers, model_params),
            model_params,
        )

    def forward_and_backward(
        self, *, fn: ForwardFn, inputs: Any, opt_params: NestedOptParam
    ) -> ForwardBackwardOutputs:
        scale = None if self._loss_scale is None else self.state["loss_scale"]["scale"]
        if scale is not None:
            fn = with_scaled_loss(fn, scale)
        if self._forward_fn_transformation is not None:
            fn = self._forward_fn_transformation(fn)
        return _forward_and_backward(self, fn, inputs, opt_params, scale)

    def update(self, updates: Updates) -> NestedTensor:
        self._add_per_variable_summaries(updates)
        applied = updates.mask(
            self._matching(should_apply_state_updates, updates.opt_params),
            fields=("inplace_updates",),
        )
        optimized = self.optimizer(
            applied.mask(self.should_update_with_optimizers, fields=("opt_params", "delta_updates"))
        )
        new_params = optimized.replace(opt_params=updates.opt_params).updated_values()
        if self._ema is not None:
            new_opt_params = _with_values(updates.opt_params, new_params)
            _, ema_state = self._ema.update({}, self.state["ema"], new_opt_params)
            self.add_state_update("ema", ema_state)
        if self.config.ignore_undefined_loss or self._loss_scale is not None:
            new_params = self._unless_undefined(new_params, updates)
        return new_params

    def _unless_undefined(self, new_params: NestedTensor, updates: Updates) -> NestedTensor:
        """Returns the new parameters; if undefined, restores the old state and parameters."""
        losses = [forward_pass.outputs.loss for forward_pass in updates.forward_pass.values()]
        trained = updates.mask(self.should_update_with_optimizers, fields=("delta_updates",))
        is_defined = all_finite([*losses, trained.delta_updates])
        new_state = self.get_invocation_context().get_state_updates()
        for name in new_state:
            new_state[name] = tree_where(is_defined, new_state[name], self.state[name])
        if self.config.ignore_undefined_loss:
            count = self.state["undefined_loss_count"] + jnp.where(is_defined, 0, 1)
            self.add_state_update("undefined_loss_count", count)
            self.add_summary("undefined_loss_count", count)
        if self._loss_scale is not None:
            state = self.state["loss_scale"]
            self.add_state_update("loss_scale", self._loss_scale.after(state, is_finite=is_defined))
            self.add_summary("loss_scale", state["scale"])
        return tree_where(is_defined, new_params, updates.param_values())

    def _matching(self, wanted: Callable[[UpdateType | None], bool], tree: Any) -> Nested[bool]:
        return jax.tree.map(lambda path: wanted(self._update_type(path)), tree_paths(tree))

    def _update_type(self, path: str) -> UpdateType | None:
        for pattern, update_type in self.config.update_rules:
            if re.fullmatch(pattern, path):
                return update_type
        return UpdateType.ALL_UPDATES

    def _optimized(self, tree: Any) -> Any:
        keep = self.should_update_with_optimizers(tree)
        return mask_tree(tree, keep=keep, mask_value=optax.MaskedNode())

    def _add_per_variable_summaries(self, updates: Updates) -> None:
        chosen = self.config.enable_per_variable_summaries
        if not chosen:
            return
        patterns = [".*"] if chosen is True else chosen
        reported = {"param": updates.param_values(), "grad": updates.delta_updates}
        for kind, tree in reported.items():
            for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
                if not jnp.issubdtype(x.dtype, jnp.inexact):
                    continue
                name = path_name(path)
                if any(re.fullmatch(pattern, name) for pattern in patterns):
                    for stat, fn in self._stats.items():
                        self.add_summary(f"{kind}_{stat}/{name}", fn(x))


class CompositeLearner(BaseLearner):
    """Learner that assigns each parameter to one of several learners.

    Its state has an entry for each learner, and "ema" if it averages the parameters.
    """

    @config_class
    class Config(BaseLearner.Config):
        """Configures a CompositeLearner.

        Attributes:
          rules: pairs of a regular expression, which must match the whole path of a parameter, and
            the name of its learner; the first match counts. Each parameter must match one.
          ema: as for `Learner`, of all parameters.
          forward_fn_transformation: as for `Learner`; the learners themselves may have none.
        """

        rules: Required[Sequence[tuple[str, str]]] = REQUIRED
        learners: Mapping[str, BaseLearner.Config] = {}
        ema: InstantiableConfig = config_for_function(param_ema)
        forward_fn_transformation: ConfigOr[ForwardFnTransformation] | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for name, learner in cfg.learners.items():
            self._check_learner(name, learner)
            self._add_child(name, learner)
        for pattern, name in cfg.rules:
            if name not in cfg.learners:
                raise UpdateRuleError(
                    f"the rule ({pattern!r}, {name!r}) names no learner of {self.path()}. "
                    f"{did_you_mean(name, cfg.learners)}"
                )
        self._ema = _ema_or_none(cfg.ema)
        self._forward_fn_transformation = maybe_instantiate(cfg.forward_fn_transformation)

    def _check_learner(self, name: str, learner: BaseLearner.Config) -> None:
        if name == "ema":
            raise UpdateRuleError(
                "a learner cannot be named 'ema', which is the name of the moving average of the "
                "parameters. Choose another name."
            )
        if getattr(learner, "forward_fn_transformation", None) is not None:
            raise UpdateRuleError(
                f"the learner {name!r} has a forward_fn_transformation, but all learners of "
                f"{self.path()} share one forward pass; set it there."
            )
        if getattr(learner, "loss_scale", None) is not None:
            raise UpdateRuleError(
                f"the learner {name!r} has a loss_scale, but all learners of {self.path()} share "
                "one loss, which has none; train with one Learner and `update_rules`."
            )

    @nowrap
    def init(self, model_params: NestedOptParam) -> dict[str, Any]:
        state = {
            name: self.children[name].init(part) for name, part in self._parts(model_params).items()
        }
        if self._ema is not None:
            state["ema"] = self._ema.init(model_params)
        return state

    @nowrap
    def create_state_partition_specs(
        self, model_param_specs: NestedParameterSpec
    ) -> dict[str, NestedOptStateSpec]:
        specs = {
            name: self.children[name].create_state_partition_specs(part)
            for name, part in self._parts(model_param_specs).items()
        }
        if self._ema is not None:
            specs["ema"] = self._ema.partition(model_param_specs)
        return specs

    @nowrap
    def handles_undefined_loss(self) -> bool:
        return all(learner.handles_undefined_loss() for learner in self.children.values())

    @nowrap
    def handles_undefined_gradients(self, state: Any, model_params: NestedOptParam) -> Nested[bool]:
        parts = [
            self.children[name].handles_undefined_gradients(state[name], part)
            for name, part in self._parts(model_params).items()
        ]
        return _merge_parts(model_params, parts)

    @nowrap
    def should_update_with_optimizers(self, model_params: NestedOptParam) -> Nested[bool]:
        return _merge_parts(
            model_params,
            [
                self.children[name].should_update_with_optimizers(part)
                for name, part in self._parts(model_params).items()
            ],
        )

    def forward_and_backward(
        self, *, fn: ForwardFn, inputs: Any, opt_params: NestedOptParam
    ) -> ForwardBackwardOutputs:
        if self._forward_fn_transformation is not None:
            fn = self._forward_fn_transformation(fn)
        return _forward_and_backward(self, fn, inputs, opt_params)

    def update(self, updates: Updates) -> NestedTensor:
        parts = [
            self.children[name].update(updates.mask(keep))
            for name, keep in self._kept_by_learner(updates.opt_params).items()
        ]
        new_params = _merge_parts(updates.opt_params, parts)
        if self._ema is not None:
            new_opt_params = _with_values(updates.opt_params, new_params)
            _, ema_state = self._ema.update({}, self.state["ema"], new_opt_params)
            self.add_state_update("ema", ema_state)
        return new_params

    def _parts(self, tree: Any) -> dict[str, Any]:
        """Returns for each learner the tree with the other learners' parameters masked."""
        return {
            name: mask_tree(tree, keep=keep, mask_value=optax.MaskedNode())
            for name, keep in self._kept_by_learner(tree).items()
        }

    def _kept_by_learner(self, tree: Any) -> dict[str, Nested[bool]]:
        names = jax.tree.map(self._learner_of, tree_paths(tree))
        return {
            learner: jax.tree.map(lambda name, learner=learner: name == learner, names)
            for learner in self.children
        }

    def _learner_of(self, path: str) -> str:
        for pattern, name in self.config.rules:
            if re.fullmatch(pattern, path):
                return name
        raise UpdateRuleError(
            f"no rule of {self.path()} matches the parameter {path!r}, so no learner would update "
            "it; the patterns, which must match the whole path, are "
            f"{[pattern for pattern, _ in self.config.rules]}. Add a last rule "
            "('.*', name of a learner)."
        )


def _merge_parts(tree: Any, parts: Sequence[Any]) -> Any:
    """Returns a tree like `tree` with each leaf from the part that has it."""
    leaf_at = {
        path: leaf for part in parts for path, leaf in jax.tree_util.tree_flatten_with_path(part)[0]
    }
    return jax.tree_util.tree_map_with_path(lambda path, _: leaf_at[path], tree)


def _ema_or_none(cfg: InstantiableConfig) -> PartitionedGradientTransformation | None:
    return None if cfg.decay is None else as_partitioned(cfg)


def _with_values(opt_params: NestedOptParam, values: NestedTensor) -> NestedOptParam:
    return jax.tree.map(
        lambda param, value: dataclasses.replace(param, value=value), opt_params, values
    )


def _forward_and_backward(
    learner: BaseLearner,
    fn: ForwardFn,
    inputs: Any,
    opt_params: NestedOptParam,
    loss_scale: Tensor | None = None,
) -> ForwardBackwardOutputs:
    trainable = learner.should_update_with_optimizers(opt_params)
    forward_pass, gradients = forward_and_gradients(
        fn, inputs=inputs, opt_params=opt_params, trainable=trainable
    )
    if loss_scale is not None:
        gradients = unscaled(gradients, loss_scale)
        loss = unscaled(forward_pass.outputs.loss, loss_scale)
        forward_pass = forward_pass.replace(outputs=forward_pass.outputs.replace(loss=loss))
    outputs = forward_pass.outputs
    updated_params = learner.update(
        Updates(
            opt_params=opt_params,
            delta_updates=gradients,
            inplace_updates=outputs.output_collection.state_updates,
            forward_pass={"default": forward_pass},
        )
    )
    handled = learner.handles_undefined_gradients(learner.state, opt_params)
    watched = jax.tree.map(lambda is_handled: not is_handled, handled)
    return ForwardBackwardOutputs(
        forward_outputs=outputs,
        backward_outputs=BackwardOutputs(
            updated_params=updated_params,
            gradients=mask_tree(gradients, keep=watched, mask_value=optax.MaskedNode()),
        ),
    )
