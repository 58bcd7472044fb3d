"""Learners: the update of a model's parameters in a step.

A learner runs the forward pass, differentiates the loss with respect to the parameters that
optimizers update, transforms the gradients, and returns the new parameters. Its state (moments,
counts, moving averages of parameters) is a nested dict; an invocation reads it and adds updates.

It may scale the loss, which keeps half-precision gradients from underflow: the scale grows after a
number of steps with finite gradients, and falls after a step whose gradients are not finite; that
step changes nothing else (Micikevicius et al., 2018). It may report statistics of parameters and
gradients (`per_variable_stats`).
"""

import dataclasses
import enum
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from weft import config, errors
from weft.hierarchy.base_layer import NestedParameterSpec
from weft.hierarchy.context import fold_in_name, set_current_context
from weft.hierarchy.module import Module, nowrap
from weft.trainer.dynamic_scale import DynamicScale
from weft.trainer.gradients import forward_and_gradients
from weft.trainer.optimizers import base, clipping, transformations
from weft.trainer.precision import Precision, as_precision
from weft.trainer.update_transformation import (
    BackwardOutputs,
    ForwardBackwardOutputs,
    ForwardFn,
    ForwardOutputs,
    ForwardPass,
    LearnerModule,
    Updates,
    as_update_transformation,
    mask_tree,
)
from weft.typing import DType, Nested, NestedTensor, PyTree, T, Tensor

_LearnerConfig = TypeVar("_LearnerConfig", bound=config.InstantiableConfig)


_COUNT = base.PartitionedGradientTransformation(
    init=lambda _: jnp.zeros((), jnp.int32),
    update=lambda updates, state, params: (updates, state),
    partition=lambda _: base.COUNT_SPEC,
)


class DynamicLossScale(config.Configurable):
    """Scale of a learner's loss; its state is a dict of the scale and a count of steps."""

    class Config(config.Configurable.Config):
        """Configures a DynamicLossScale."""

        initial_scale: float = 2.0**15
        growth_factor: float = 2.0
        """Factor by which the scale grows; above 1."""
        backoff_factor: float = 0.5
        """Factor, below 1, after a step whose gradients are not finite."""
        growth_interval: int = 2000
        """Number of consecutive finite steps after which it grows."""
        minimum_scale: float = 1.0

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        expectations = (
            ("growth_factor", cfg.growth_factor > 1, "a factor above 1"),
            (
                "backoff_factor",
                0 < cfg.backoff_factor < 1,
                "a factor between 0 and 1",
            ),
            ("growth_interval", cfg.growth_interval >= 1, "1 or more steps"),
            ("minimum_scale", cfg.minimum_scale > 0, "a scale above 0"),
            (
                "initial_scale",
                cfg.initial_scale >= cfg.minimum_scale,
                f"at least minimum_scale={cfg.minimum_scale:g}",
            ),
        )
        for name, holds, expected in expectations:
            if not holds:
                raise errors.LossScaleError(
                    f"loss_scale.{name}={getattr(cfg, name):g}; expected {expected}."
                )

    def init(
        self, params: base.NestedOptParam | None = None
    ) -> dict[str, Tensor]:
        """Returns the state before the first step, whatever the parameters."""
        return {
            "scale": jnp.array(self.config.initial_scale, jnp.float32),
            "finite_steps": jnp.zeros((), jnp.int32),
        }

    def partition(
        self, params: NestedParameterSpec | None = None
    ) -> dict[str, base.OptStateSpec]:
        """Returns the layout of the state."""
        return {
            "scale": base.replicated((), jnp.float32),
            "finite_steps": base.COUNT_SPEC,
        }

    def after(
        self, state: dict[str, Tensor], *, is_finite: Tensor
    ) -> dict[str, Tensor]:
        """Returns the state after a step whose gradients were all finite, or not."""
        cfg = self.config
        scale = DynamicScale(
            growth_factor=cfg.growth_factor,
            backoff_factor=cfg.backoff_factor,
            growth_interval=cfg.growth_interval
            - 1,  # it counts the steps before this one
            minimum_scale=cfg.minimum_scale,
            scale=state["scale"],
            fin_steps=state["finite_steps"],
        )
        new_scale = scale.after(is_finite)
        return {
            "scale": jnp.asarray(new_scale.scale),
            "finite_steps": jnp.asarray(new_scale.fin_steps, jnp.int32),
        }


def with_scaled_loss(fn: ForwardFn, scale: Tensor) -> ForwardFn:
    """Returns a forward pass whose loss is multiplied by a scale, in single precision."""

    def forward(
        *, model_params: NestedTensor, inputs: NestedTensor
    ) -> ForwardOutputs:
        outputs = fn(model_params=model_params, inputs=inputs)
        return outputs.replace(loss=outputs.loss.astype(jnp.float32) * scale)

    return forward


def unscaled(tree: T, scale: Tensor) -> T:
    """Divides losses or gradients by the scale, in at least single precision."""

    def unscale(x: Tensor) -> Tensor:
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)) / scale

    return jax.tree.map(unscale, tree)


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
    """Returns whether optimizers update such a parameter; None means `NO_UPDATE`."""
    return update_type in (UpdateType.OPTIMIZERS, UpdateType.ALL_UPDATES)


def should_apply_state_updates(update_type: UpdateType | None) -> bool:
    """Returns whether in-place updates apply to such a parameter; None means `NO_UPDATE`."""
    return update_type in (UpdateType.STATE_UPDATES, UpdateType.ALL_UPDATES)


class BaseLearner(LearnerModule):
    """Interface between a trainer and its learner."""

    def forward_and_backward(
        self,
        *,
        fn: ForwardFn,
        inputs: NestedTensor,
        opt_params: base.NestedOptParam,
    ) -> ForwardBackwardOutputs:
        """Runs the forward pass `fn` on `inputs`, differentiates, and updates the parameters."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `forward_and_backward`."
        )

    def update(self, updates: Updates) -> NestedTensor:
        """Returns the parameters after an update, whose deltas are gradients.

        Deltas of parameters that optimizers do not update are masked or ignored.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `update`."
        )

    @nowrap
    def should_update_with_optimizers(
        self, model_params: base.NestedOptParam
    ) -> Nested[bool]:
        """Returns for each parameter, or leaf at its path, whether optimizers update it."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `should_update_with_optimizers`."
        )

    @nowrap
    def handles_undefined_loss(self) -> bool:
        """Returns whether training may continue after a step whose loss is NaN or infinite."""
        return False

    @nowrap
    def handles_undefined_gradients(
        self, state: Mapping[str, Any], model_params: base.NestedOptParam
    ) -> Nested[bool]:
        """Returns for each parameter whether steps with undefined gradients are skipped for it."""
        return jax.tree.map(
            lambda _: self.handles_undefined_loss(), model_params
        )


class _OneForwardPassLearner(BaseLearner):
    """Base of learners that differentiate one forward pass, and may average the parameters."""

    class Config(BaseLearner.Config):
        """Configures the forward pass and the moving average."""

        ema: config.InstantiableConfig = config.config_for_function(
            transformations.param_ema
        )
        """The moving average of all parameters, kept if its `decay` is not None, and used in
        evaluation. A schedule-free optimizer needs `decay="schedule_free"`, its own average."""
        forward_fn_transformation: (
            config.ConfigOr[ForwardFnTransformation] | None
        ) = None
        """Applied to the forward pass before it is differentiated, such as `with_minibatch_steps`,
        which accumulates gradients."""
        precision: str | Precision.Config | None = None
        """Dtypes of the optimizer's state, and the rounding of parameters; set by the trainer to
        its own. None leaves both to the optimizer."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._ema: base.PartitionedGradientTransformation | None = None
        # What makes the parts of the state besides those of optimizers.
        self._additional_state: dict[
            str, base.PartitionedGradientTransformation | DynamicLossScale
        ] = {}
        if cfg.ema.decay is not None:
            self._ema = self._additional_state["ema"] = base.as_partitioned(
                cfg.ema
            )
        self._forward_fn_transformation: ForwardFnTransformation | None = (
            config.maybe_instantiate(cfg.forward_fn_transformation)
        )
        self._loss_scale: DynamicLossScale | None = None

    def init(self, model_params: base.NestedOptParam) -> dict[str, Any]:
        state = self._call_optimizers("init", model_params)
        self._check_average(state)
        params = base.at_least_float32(model_params)
        for name, maker in self._additional_state.items():
            state[name] = maker.init(params)
        return state

    def create_state_partition_specs(
        self, model_param_specs: NestedParameterSpec
    ) -> dict[str, base.NestedOptStateSpec]:
        specs = self._call_optimizers(
            "create_state_partition_specs", model_param_specs
        )
        self._check_average(specs)
        param_specs = base.at_least_float32(model_param_specs)
        for name, maker in self._additional_state.items():
            specs[name] = maker.partition(param_specs)
        return specs

    @nowrap
    def is_schedule_free(self, model_param_specs: NestedParameterSpec) -> bool:
        """Returns whether an optimizer is schedule-free, and so needs `ema.decay`."""
        specs = self._call_optimizers(
            "create_state_partition_specs", model_param_specs
        )
        return bool(transformations.schedule_free_states(specs))

    def _check_average(self, state: dict[str, Any]) -> None:
        """Raises OptimizerArgumentError if `ema` does not fit schedule-free optimizers."""
        if isinstance(self.parent, BaseLearner):
            return  # the outer learner keeps the average
        decay = self.config.ema.decay
        is_schedule_free = bool(transformations.schedule_free_states(state))
        if is_schedule_free and decay != transformations.SCHEDULE_FREE:
            raise errors.OptimizerArgumentError(
                f"{self.path()} has a schedule-free optimizer and ema.decay={decay!r}; such an "
                "optimizer trains at other parameters than those to evaluate and to save. Set "
                f"ema.decay={transformations.SCHEDULE_FREE!r} of the learner."
            )
        if decay == transformations.SCHEDULE_FREE and not is_schedule_free:
            raise errors.OptimizerArgumentError(
                f"{self.path()} has ema.decay={decay!r}, but no schedule-free optimizer, such as "
                "optax.contrib.schedule_free_adamw. Set ema.decay to a number, or None for no "
                "average."
            )

    def _call_optimizers(
        self, method: str, params: PyTree
    ) -> dict[str, PyTree]:
        """Calls a method of each optimizer with its parameters or specs; returns results by name.

        `params` may be a tree of parameters or of their specs.
        """
        raise NotImplementedError(type(self))

    def forward_and_backward(
        self,
        *,
        fn: ForwardFn,
        inputs: NestedTensor,
        opt_params: base.NestedOptParam,
    ) -> ForwardBackwardOutputs:
        forward_pass, gradients = forward_and_gradients(
            self._differentiated_fn(fn),
            inputs=inputs,
            opt_params=opt_params,
            trainable=self.should_update_with_optimizers(opt_params),
        )
        forward_pass, gradients = self._unscaled(fn, forward_pass, gradients)
        outputs = forward_pass.outputs
        updates = Updates(
            opt_params=opt_params,
            delta_updates=gradients,
            inplace_updates=outputs.output_collection.state_updates,
            forward_pass={"default": forward_pass},
        )
        updated_params = self.update(updates)
        # The trainer watches only gradients that would spoil the parameters.
        is_handled = self.handles_undefined_gradients(self.state, opt_params)
        must_be_finite = jax.tree.map(operator.not_, is_handled)
        gradients = mask_tree(gradients, keep=must_be_finite)
        return ForwardBackwardOutputs(
            forward_outputs=outputs,
            backward_outputs=BackwardOutputs(
                updated_params=updated_params, gradients=gradients
            ),
        )

    def _differentiated_fn(self, fn: ForwardFn) -> ForwardFn:
        """Returns the function to differentiate; its loss is scaled if there is a scale."""
        if self._loss_scale is not None:
            # Before the transformation: each microbatch has a loss and gradients of its own.
            fn = with_scaled_loss(fn, self.state["loss_scale"]["scale"])
        return self._transformed(fn)

    def _unscaled(
        self, fn: ForwardFn, forward_pass: ForwardPass, gradients: NestedTensor
    ) -> tuple[ForwardPass, NestedTensor]:
        """Returns loss and gradients without the scale of the function that was differentiated."""
        if self._loss_scale is None:
            return forward_pass, gradients
        scale = self.state["loss_scale"]["scale"]
        loss = unscaled(forward_pass.outputs.loss, scale)
        outputs = forward_pass.outputs.replace(loss=loss)
        forward_pass = forward_pass.replace(
            outputs=outputs, forward_fn=self._transformed(fn)
        )
        return forward_pass, unscaled(gradients, scale)

    def _transformed(self, fn: ForwardFn) -> ForwardFn:
        if self._forward_fn_transformation is None:
            return fn
        return self._forward_fn_transformation(fn)

    def _update_ema(
        self, opt_params: base.NestedOptParam, new_params: NestedTensor
    ) -> None:
        if self._ema is None:
            return

        def with_value(param: base.OptParam, value: Tensor) -> base.OptParam:
            return dataclasses.replace(param, value=value)

        new_opt_params = jax.tree.map(with_value, opt_params, new_params)
        optimizer_states = self.get_invocation_context().get_state_updates()
        _, ema_state = base.update_with(
            self._ema,
            {},
            self.state["ema"],
            base.at_least_float32(new_opt_params),
            {"optimizer_states": optimizer_states},
        )
        self.add_state_update("ema", ema_state)


class Learner(_OneForwardPassLearner):
    """Learner with one optimizer.

    Its state has the entries "optimizer", "ema" if a moving average of the parameters is kept,
    "undefined_loss_count" if undefined losses are skipped, and "loss_scale" if the loss is scaled.
    """

    class Config(_OneForwardPassLearner.Config):
        """Configures a Learner."""

        optimizer: config.Required[config.InstantiableConfig] = config.REQUIRED
        """Config of a function that returns an optimizer or an `UpdateTransformation`."""
        update_rules: Sequence[tuple[str, UpdateType | None]] = []
        """Pairs of a regular expression, which must match the whole path of a parameter, and its
        kind of updates; the first match counts. Without a match, a parameter gets all updates.
        State of layers (`ParameterSpec.is_state`) is never optimized."""
        enable_per_variable_summaries: bool | list[str] = False
        """Whether to report statistics of each parameter and its gradient; or regular expressions
        of the paths to report."""
        per_variable_stats: Sequence[str] = ("rms",)
        """The statistics to report: "rms", the root mean square; "norm", the root of the sum of
        squares; "max_abs", the maximum absolute value; "histogram", up to 1,024 of the values,
        evenly spaced over the array."""
        ignore_undefined_loss: bool = False
        """Whether to skip and count steps with an undefined loss or gradient."""
        loss_scale: DynamicLossScale.Config | None = None
        """Scale of the loss during differentiation, for half precision. Steps with gradients that
        are not finite change only the scale."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child("optimizer", as_update_transformation(cfg.optimizer))
        self._loss_scale = config.maybe_instantiate(cfg.loss_scale)
        if cfg.ignore_undefined_loss:
            self._additional_state["undefined_loss_count"] = _COUNT
        if self._loss_scale is not None:
            self._additional_state["loss_scale"] = self._loss_scale
        self._precision: Precision | None = None
        if cfg.precision is not None:
            self._precision = as_precision(cfg.precision)
        self._stats = {
            name: variable_stat(name) for name in cfg.per_variable_stats
        }

    def handles_undefined_loss(self) -> bool:
        return self.config.ignore_undefined_loss

    def handles_undefined_gradients(
        self, state: Mapping[str, Any], model_params: base.NestedOptParam
    ) -> Nested[bool]:
        handles = (
            self.handles_undefined_loss()
            or self._loss_scale is not None
            or clipping.skips_undefined(state["optimizer"])
        )
        return jax.tree.map(lambda _: handles, model_params)

    def should_update_with_optimizers(
        self, model_params: base.NestedOptParam
    ) -> Nested[bool]:
        def is_optimized(
            update_type: UpdateType | None, param: base.OptParam
        ) -> bool:
            is_state = getattr(param, "is_state", False)
            return should_update_with_optimizers(update_type) and not is_state

        return jax.tree.map(
            is_optimized, self._update_types(model_params), model_params
        )

    def update(self, updates: Updates) -> NestedTensor:
        self._add_per_variable_summaries(updates)
        # The optimizer sees no masked leaves, and has no state for them.
        applies_state = jax.tree.map(
            should_apply_state_updates, self._update_types(updates.opt_params)
        )
        masked = updates.mask(applies_state, fields=("inplace_updates",))
        masked = masked.mask(
            self.should_update_with_optimizers,
            fields=("opt_params", "delta_updates"),
        )
        # The sum is over all parameters again; those without an update keep their values.
        optimized = self._optimize(masked).replace(
            opt_params=updates.opt_params
        )
        round_sum = None
        if self._precision is not None:
            round_sum = functools.partial(self._rounded_param, self._precision)
        new_params = optimized.updated_values(round_sum)
        self._update_ema(updates.opt_params, new_params)
        # Last, since it takes back what the step has added to the state, the average included.
        if self.config.ignore_undefined_loss or self._loss_scale is not None:
            new_params = self._unless_undefined(new_params, updates)
        return new_params

    def _optimize(self, updates: Updates) -> Updates:
        """Runs the optimizer, with a policy in float32 on numbers that are stored in fewer bits."""
        if self._precision is None:
            return self.optimizer(updates)
        context = self.get_invocation_context()
        stored_state = self.state["optimizer"]
        state = {**self.state, "optimizer": base.at_least_float32(stored_state)}
        wide_updates = updates.replace(
            opt_params=base.at_least_float32(updates.opt_params),
            delta_updates=base.at_least_float32(updates.delta_updates),
        )
        with set_current_context(
            context.fork_with_outputs(state=state), require_parent=False
        ):
            optimized = self.optimizer(wide_updates)
        state_updates = context.get_state_updates()
        state_updates["optimizer"] = self._precision.round_tree(
            state_updates["optimizer"],
            stored_state,
            lambda: self._rounding_key("moments"),
        )
        return optimized

    def _rounded_param(
        self, precision: Precision, path: str, x: Tensor, dtype: DType
    ) -> Tensor:
        return precision.round(
            x, dtype, lambda: fold_in_name(self._rounding_key("params"), path)
        )

    def _rounding_key(self, purpose: str) -> Tensor:
        if self.prng_key is None:
            raise errors.MissingPrngKeyError(
                f"{self.path()} rounds stochastically, and the invocation has no PRNG key; pass "
                "prng_key= to `functional`, or set stochastic_rounding=False of its precision."
            )
        return fold_in_name(self.prng_key, f"rounding of {purpose}")

    def _unless_undefined(
        self, new_params: NestedTensor, updates: Updates
    ) -> NestedTensor:
        """Returns the new parameters; if undefined, restores the old state and parameters."""
        losses = [
            forward_pass.outputs.loss
            for forward_pass in updates.forward_pass.values()
        ]
        trained = updates.mask(
            self.should_update_with_optimizers, fields=("delta_updates",)
        )
        is_defined = clipping.all_finite([*losses, trained.delta_updates])
        new_state = self.get_invocation_context().get_state_updates()
        for name in new_state:
            new_state[name] = clipping.tree_where(
                is_defined, new_state[name], self.state[name]
            )
        if self.config.ignore_undefined_loss:
            count = self.state["undefined_loss_count"] + jnp.where(
                is_defined, 0, 1
            )
            self.add_state_update("undefined_loss_count", count)
            self.add_summary("undefined_loss_count", count)
        if self._loss_scale is not None:
            state = self.state["loss_scale"]
            self.add_state_update(
                "loss_scale",
                self._loss_scale.after(state, is_finite=is_defined),
            )
            self.add_summary("loss_scale", state["scale"])
        return clipping.tree_where(
            is_defined, new_params, updates.param_values()
        )

    def _update_types(self, tree: PyTree) -> Nested[UpdateType | None]:
        """Returns the kind of updates of each leaf, by the first of the `update_rules` for it."""

        def update_type_of(path: str) -> UpdateType | None:
            for pattern, update_type in self.config.update_rules:
                if re.fullmatch(pattern, path):
                    return (
                        update_type or UpdateType.NO_UPDATE
                    )  # None would be no leaf
            return UpdateType.ALL_UPDATES

        return jax.tree.map(update_type_of, base.tree_paths(tree))

    def _call_optimizers(
        self, method: str, params: PyTree
    ) -> dict[str, PyTree]:
        call = getattr(self.optimizer, method)
        optimized = mask_tree(
            params, keep=self.should_update_with_optimizers(params)
        )
        if self._precision is None:
            return {"optimizer": call(optimized)}
        wide_state = call(base.at_least_float32(optimized))
        return {
            "optimizer": self._precision.with_stored_moments(
                wide_state, optimized
            )
        }

    def _add_per_variable_summaries(self, updates: Updates) -> None:
        patterns = self.config.enable_per_variable_summaries
        if patterns is True:
            patterns = [".*"]
        if not patterns:
            return
        trees = {"param": updates.param_values(), "grad": updates.delta_updates}
        for kind, tree in trees.items():
            for path, x in base.leaves_by_path(tree).items():
                if not jnp.issubdtype(x.dtype, jnp.inexact):
                    continue
                name = base.path_name(path)
                if any(re.fullmatch(pattern, name) for pattern in patterns):
                    for stat, fn in self._stats.items():
                        self.add_summary(f"{kind}_{stat}/{name}", fn(x))


class CompositeLearner(_OneForwardPassLearner):
    """Learner that assigns each parameter to one of several learners.

    Its state has an entry for each learner, and "ema" if it averages the parameters.
    """

    class Config(_OneForwardPassLearner.Config):
        """Configures a CompositeLearner.

        `rules` are pairs of a regular expression, which must match the whole path of a parameter,
        and the name of its learner; the first match counts. Each parameter must match one.
        """

        rules: config.Required[Sequence[tuple[str, str]]] = config.REQUIRED
        learners: Mapping[str, BaseLearner.Config] = {}

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for name, learner in cfg.learners.items():
            self._check_learner(name, learner)
            self._add_child(name, with_precision(learner, cfg.precision))
        for pattern, name in cfg.rules:
            if name not in cfg.learners:
                raise errors.UpdateRuleError(
                    f"the rule ({pattern!r}, {name!r}) names no learner of {self.path()}. "
                    f"{errors.did_you_mean(name, cfg.learners)}"
                )

    def _check_learner(self, name: str, learner: BaseLearner.Config) -> None:
        if name == "ema":
            raise errors.UpdateRuleError(
                "a learner cannot be named 'ema', which is the name of the moving average of the "
                "parameters. Choose another name."
            )
        if getattr(learner, "forward_fn_transformation", None) is not None:
            raise errors.UpdateRuleError(
                f"the learner {name!r} has a forward_fn_transformation, but all learners of "
                f"{self.path()} share one forward pass; set it there."
            )
        if getattr(learner, "loss_scale", None) is not None:
            raise errors.UpdateRuleError(
                f"the learner {name!r} has a loss_scale, but all learners of {self.path()} share "
                "one loss, which has none; train with one Learner and `update_rules`."
            )

    def handles_undefined_loss(self) -> bool:
        return all(
            learner.handles_undefined_loss()
            for learner in self.children.values()
        )

    def handles_undefined_gradients(
        self, state: Mapping[str, Any], model_params: base.NestedOptParam
    ) -> Nested[bool]:
        parts: list[Nested[bool]] = []
        for name, keep in self._masks(model_params).items():
            learner = self.children[name]
            part = mask_tree(model_params, keep=keep)
            parts.append(learner.handles_undefined_gradients(state[name], part))
        return _merge_parts(model_params, parts)

    def should_update_with_optimizers(
        self, model_params: base.NestedOptParam
    ) -> Nested[bool]:
        parts = self._call_optimizers(
            "should_update_with_optimizers", model_params
        )
        return _merge_parts(model_params, parts.values())

    def update(self, updates: Updates) -> NestedTensor:
        parts: list[NestedTensor] = []
        for name, keep in self._masks(updates.opt_params).items():
            parts.append(self.children[name].update(updates.mask(keep)))
        new_params = _merge_parts(updates.opt_params, parts)
        self._update_ema(updates.opt_params, new_params)
        return new_params

    def _call_optimizers(
        self, method: str, params: PyTree
    ) -> dict[str, PyTree]:
        results: dict[str, PyTree] = {}
        for name, keep in self._masks(params).items():
            call = getattr(self.children[name], method)
            results[name] = call(mask_tree(params, keep=keep))
        return results

    def _masks(self, tree: PyTree) -> dict[str, Nested[bool]]:
        """Returns for each learner which of the parameters are its own."""
        learner_names = jax.tree.map(self._learner_of, base.tree_paths(tree))
        masks: dict[str, Nested[bool]] = {}
        for learner in self.children:
            masks[learner] = jax.tree.map(
                functools.partial(operator.eq, learner), learner_names
            )
        return masks

    def _learner_of(self, path: str) -> str:
        for pattern, name in self.config.rules:
            if re.fullmatch(pattern, path):
                return name
        raise errors.UpdateRuleError(
            f"no rule of {self.path()} matches the parameter {path!r}, so no learner would update "
            "it; the patterns, which must match the whole path, are "
            f"{[pattern for pattern, _ in self.config.rules]}. Add a last rule "
            "('.*', name of a learner)."
        )


def _merge_parts(tree: PyTree, parts: Iterable[Nested[T]]) -> Nested[T]:
    """Returns a tree like `tree` with each leaf from the part that has it."""
    leaves: dict[jax.tree_util.KeyPath, T] = {}
    for part in parts:
        leaves.update(base.leaves_by_path(part))
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path], tree)


def with_precision(
    learner: _LearnerConfig, precision: str | Precision.Config | None
) -> _LearnerConfig:
    """Returns the config of a learner with a policy for its dtypes; None leaves its own.

    Raises:
        InvalidConfigValueError: if the learner knows no policies.
    """
    if precision is None:
        return learner
    if "precision" not in learner.keys():  # noqa: SIM118 - a config is not a mapping
        raise errors.InvalidConfigValueError(
            f"precision={precision!r:.80} also sets the dtypes of the learner's state, but "
            f"{learner.klass.__name__} has no field 'precision'; expected a learner such as "
            "weft.trainer.Learner. Set the dtypes of the model instead: `dtype` of its config, "
            "and `train_dtype` of the trainer."
        )
    return learner.clone(precision=precision)


_NUM_SAMPLES = 1024


def variable_stat(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the function that computes a statistic, or raises a VariableStatError."""
    if name not in _STATS:
        raise errors.VariableStatError(
            f"per_variable_stats names {name!r}, which is not a statistic. "
            f"{errors.did_you_mean(name, _STATS)}"
        )
    return _STATS[name]


def _root_mean_square(x: Tensor) -> Tensor:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def _norm(x: Tensor) -> Tensor:
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))


def _max_abs(x: Tensor) -> Tensor:
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def _samples(x: Tensor) -> Tensor:
    interval = math.ceil(x.size / _NUM_SAMPLES)
    return x.reshape(-1)[::interval].astype(jnp.float32)


_STATS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms": _root_mean_square,
    "norm": _norm,
    "max_abs": _max_abs,
    "histogram": _samples,
}
