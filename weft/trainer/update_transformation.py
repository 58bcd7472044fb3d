"""Updates of parameters in a learner, and modules that transform them.

A delta update is added to a parameter: gradients become deltas. An in-place update replaces it,
such as a moving average computed in the forward pass. An `UpdateTransformation` is a module that
maps updates to updates; optimizers are wrapped as one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from weft import config, errors, struct
from weft.core.flat_dict import unflatten_dict
from weft.hierarchy.base_layer import NestedParameterSpec, ParameterSpec
from weft.hierarchy.context import require_context
from weft.hierarchy.module import Module, OutputCollection, nowrap
from weft.trainer.optimizers import base, clipping
from weft.typing import DType, Nested, NestedTensor, PyTree, T, Tensor


class LearnerModule(Module):
    """Module that creates its own state from parameters, and its layout from their specs."""

    @nowrap
    def init(self, model_params: base.NestedOptParam) -> Any:
        """Returns the state before the first step, given the parameters of a model."""
        raise NotImplementedError(f"{type(self).__name__} must define `init`.")

    @nowrap
    def create_state_partition_specs(
        self, model_param_specs: NestedParameterSpec
    ) -> base.NestedOptStateSpec:
        """Returns the layout of the state: a tree like that of `init`, of tensor specs."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `create_state_partition_specs`."
        )


class ForwardOutputs(struct.PyTreeNode):
    """Outputs of a forward pass: loss, auxiliary outputs, and side outputs of the model.

    State updates among the side outputs become in-place updates.
    """

    loss: Any
    aux: Any
    output_collection: OutputCollection


class ForwardFn(Protocol):
    """Pure function of a model's parameters and of inputs, such as a batch and PRNG keys."""

    def __call__(
        self, *, model_params: NestedTensor, inputs: NestedTensor
    ) -> ForwardOutputs:
        """Runs the model."""
        ...


class ForwardPass(struct.PyTreeNode):
    """Forward pass that was run, with all that is needed to run it again."""

    forward_fn: ForwardFn = struct.field(pytree_node=False)
    inputs: Any
    model_params: Any
    outputs: ForwardOutputs


class BackwardOutputs(struct.PyTreeNode):
    """Outputs of the backward pass and the update.

    `gradients` are those that have to be finite, without parameters for which the learner skips
    undefined steps; None if it does not tell.
    """

    updated_params: Any
    gradients: Any = None


class ForwardBackwardOutputs(struct.PyTreeNode):
    """Results of one step of a learner."""

    forward_outputs: ForwardOutputs
    backward_outputs: BackwardOutputs


def mask_tree(
    tree: PyTree, *, keep: Nested[bool], mask_value: object = optax.MaskedNode()
) -> Any:
    """Replaces the leaves of a tree that `keep`, which may have more leaves, marks False.

    >>> mask_tree({"a": 1, "b": 2}, keep={"a": True, "b": False}, mask_value=None)
    {'a': 1, 'b': None}
    """
    flags = base.leaves_by_path(keep)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if flags[path] else mask_value, tree
    )


class Updates(struct.PyTreeNode):
    """Updates of a model's parameters. Masked leaves are `optax.MaskedNode()`.

    Attributes:
      opt_params: parameters before the update.
      delta_updates: laid out as `opt_params`; initially the gradients, finally the values to add.
      inplace_updates: new values of some of the parameters, nested like them.
      forward_pass: passes that the updates come from, by name; "default" for a learner's own.
    """

    opt_params: base.NestedOptParam
    delta_updates: Any
    inplace_updates: Any = struct.field(default_factory=dict)
    forward_pass: Mapping[str, ForwardPass] = struct.field(default_factory=dict)

    def param_values(self) -> NestedTensor:
        """Returns the arrays of the parameters."""
        return base.opt_param_values(self.opt_params)

    def param_specs(self) -> NestedParameterSpec:
        """Returns the parameters' specs, as far as optimizers need them."""

        def spec_of(param: base.OptParam) -> ParameterSpec:
            return ParameterSpec(
                shape=param.shape,
                dtype=param.dtype,
                factorization=param.factorization_spec,
                weight_decay_scale=param.weight_decay_scale,
                is_state=param.is_state,
            )

        return jax.tree.map(spec_of, self.opt_params)

    def mask(
        self,
        keep: Nested[bool] | Callable[[base.NestedOptParam], Nested[bool]],
        *,
        fields: Sequence[str] = (
            "opt_params",
            "delta_updates",
            "inplace_updates",
        ),
    ) -> "Updates":
        """Masks the updates of parameters in the trees `fields`.

        `keep` is a tree like `opt_params` that marks the parameters to keep, or makes one from it.
        """
        if callable(keep):
            keep = keep(self.opt_params)
        if "inplace_updates" in fields:
            _check_inplace_updates(self)
        masked: dict[str, PyTree] = {}
        for name in fields:
            masked[name] = mask_tree(getattr(self, name), keep=keep)
        return self.replace(**masked)

    def updated_values(
        self, round_sum: Callable[[str, Tensor, DType], Tensor] | None = None
    ) -> NestedTensor:
        """Adds deltas to the parameters, then applies in-place updates.

        `round_sum` converts the sum of the parameter at a path and its delta to a dtype; None
        rounds to the nearest number.

        Raises InplaceUpdateError if the parameter of an in-place update is missing or differs.
        """
        _check_inplace_updates(self)
        deltas = base.leaves_by_path(self.delta_updates)
        inplace_updates = base.leaves_by_path(self.inplace_updates)

        def updated(path: tuple[Any, ...], param: base.OptParam) -> Tensor:
            if path in inplace_updates:
                return jnp.asarray(inplace_updates[path], param.dtype)
            if path not in deltas:
                return param.value
            total = param.value + deltas[path]
            if round_sum is None:
                return total.astype(param.dtype)
            return round_sum(base.path_name(path), total, param.dtype)

        return jax.tree_util.tree_map_with_path(updated, self.opt_params)


def _check_inplace_updates(updates: Updates) -> None:
    params = base.leaves_by_path(updates.opt_params)
    for path, value in base.leaves_by_path(updates.inplace_updates).items():
        if path not in params:
            name = base.path_name(path)
            param_names = [base.path_name(param_path) for param_path in params]
            raise errors.InplaceUpdateError(
                f"the state update {name!r} is not for a parameter; a layer may only update what "
                "its `_create_layer_parameter_specs` names. "
                f"{errors.did_you_mean(name, param_names)}"
            )
        if jnp.shape(value) != tuple(params[path].shape):
            raise errors.InplaceUpdateError(
                f"the state update of {base.path_name(path)!r} has shape {jnp.shape(value)}, but "
                f"the parameter has {tuple(params[path].shape)}."
            )


class UpdateTransformation(LearnerModule):
    """Module that maps updates to updates, in an invocation that holds its state."""

    def __call__(self, updates: Updates) -> Updates:
        return self.transform_update(updates)

    def transform_update(self, updates: Updates) -> Updates:
        """Performs one step, and adds the new state to the invocation's state updates."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `transform_update`."
        )


def set_state_update(module: Module, value: PyTree) -> None:
    """Sets the whole new state of a module, of any type.

    State updates of a root are a dict, in which a state of another type has the module's name.
    """
    context = module.get_invocation_context()
    if isinstance(value, dict):
        context.set_state_update(value)
        return
    dict_context = context
    if context.parent is not None:
        dict_context = context.parent
    dict_context.get_state_updates()[context.name] = value


def optimizer_arguments(updates: Updates) -> dict[str, Any]:
    """Returns what optimizers may take besides gradients, by the names of optax.

    None, if the updates do not come from the forward pass of a learner. `value_fn` and `grad_fn`
    run that pass again, with the same batch and noise, and drop what it reports.
    """
    forward_pass = updates.forward_pass.get("default")
    if forward_pass is None:
        return {}

    # A line search of optax passes it all other arguments, and refuses those that it does not name.
    def value_fn(
        params: NestedTensor, obj_fn: object = None, grad_fn: object = None
    ) -> Tensor:
        del obj_fn, grad_fn
        values = base.leaves_by_path(params)

        def current_value(path: jax.tree_util.KeyPath, x: Tensor) -> Tensor:
            # An optimizer sees a part of the parameters, maybe in another dtype.
            if path in values:
                return values[path].astype(x.dtype)
            return x

        all_params = jax.tree_util.tree_map_with_path(
            current_value, forward_pass.model_params
        )
        run = require_context("the loss").functional(forward_pass.forward_fn)
        outputs, _ = run(model_params=all_params, inputs=forward_pass.inputs)
        return outputs.loss

    def grad_fn(params: NestedTensor, step: int) -> NestedTensor:
        del step  # all inner steps see the same batch
        return jax.grad(value_fn)(params)

    return {
        "value": forward_pass.outputs.loss,
        "grad": updates.delta_updates,
        "value_fn": value_fn,
        "obj_fn": value_fn,
        "grad_fn": grad_fn,
    }


class WrappedPartitionedGradientTransformation(UpdateTransformation):
    """Update transformation that applies an optimizer to deltas, not to in-place updates."""

    class Config(UpdateTransformation.Config):
        transformation: config.Required[
            config.ConfigOr[
                base.PartitionedGradientTransformation
                | optax.GradientTransformation
                | optax.MultiSteps
            ]
        ] = config.REQUIRED

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._transformation = base.as_partitioned(cfg.transformation)

    def init(self, model_params: base.NestedOptParam) -> Any:
        return self._transformation.init(model_params)

    def create_state_partition_specs(
        self, model_param_specs: NestedParameterSpec
    ) -> base.NestedOptStateSpec:
        return self._transformation.partition(model_param_specs)

    def transform_update(self, updates: Updates) -> Updates:
        deltas, state = base.update_with(
            self._transformation,
            updates.delta_updates,
            self.state,
            updates.opt_params,
            optimizer_arguments(updates),
        )
        set_state_update(self, state)
        return updates.replace(delta_updates=deltas)


class OverrideInplaceUpdateTransformation(
    WrappedPartitionedGradientTransformation
):
    """Optimizer with exceptions: some parameters are replaced by their gradients.

    For statistics that a backward pass computes, such as the scales of 8-bit floating point.
    """

    class Config(WrappedPartitionedGradientTransformation.Config):
        """Configures an OverrideInplaceUpdateTransformation.

        A parameter is replaced if its whole path matches one of the regular expressions `rules`.
        """

        rules: config.Required[Sequence[str]] = config.REQUIRED

    def init(self, model_params: base.NestedOptParam) -> Any:
        return super().init(self._optimized(model_params))

    def create_state_partition_specs(
        self, model_param_specs: NestedParameterSpec
    ) -> base.NestedOptStateSpec:
        return super().create_state_partition_specs(
            self._optimized(model_param_specs)
        )

    def transform_update(self, updates: Updates) -> Updates:
        optimized = super().transform_update(
            updates.replace(
                opt_params=self._optimized(updates.opt_params),
                delta_updates=self._optimized(updates.delta_updates),
            )
        )
        inplace_updates = base.leaves_by_path(updates.inplace_updates)
        for path, delta in base.leaves_by_path(updates.delta_updates).items():
            if self._replaces(base.path_name(path)):
                inplace_updates[path] = delta
        return optimized.replace(
            opt_params=updates.opt_params,
            inplace_updates=_nested(inplace_updates),
        )

    def _replaces(self, path: str) -> bool:
        return any(re.fullmatch(rule, path) for rule in self.config.rules)

    def _optimized(self, tree: PyTree) -> PyTree:
        """Masks the parameters that are replaced."""
        keep = jax.tree.map(
            lambda path: not self._replaces(path), base.tree_paths(tree)
        )
        return mask_tree(tree, keep=keep)


class GradientMonitorTransformation(OverrideInplaceUpdateTransformation):
    """Optimizer that reports gradients before it transforms them.

    Summaries: `gradient_norm/{group}`, the root of the sum of squares of a group's gradients,
    `gradient_nonfinite/{group}`, their number of values that are NaN or infinite, and
    `activation_gradient_norm/{path}` of each layer `weft.hierarchy.layers.GradientMonitor`.
    """

    class Config(OverrideInplaceUpdateTransformation.Config):
        """Configures a GradientMonitorTransformation."""

        groups: Sequence[tuple[str, str]] = ()
        """Pairs of a regular expression, which must match the whole path of a parameter, and the
        name of its group; the first match counts, and parameters without one are not reported. If
        empty, each parameter is a group."""
        rules: Sequence[str] = (r"(.*/)?gradient_norm",)
        """Paths of the parameters whose gradients are norms at activations."""

    def transform_update(self, updates: Updates) -> Updates:
        gradients_by_group: dict[str, list[Tensor]] = {}
        for path, gradient in base.leaves_by_path(
            updates.delta_updates
        ).items():
            name = base.path_name(path)
            if self._replaces(name):
                layer, _, _ = name.rpartition("/")
                self.add_summary(f"activation_gradient_norm/{layer}", gradient)
                continue
            group = self._group_of(name)
            if group is not None:
                gradients = gradients_by_group.setdefault(group, [])
                gradients.append(gradient.astype(jnp.float32))
        for group, gradients in gradients_by_group.items():
            self.add_summary(
                f"gradient_norm/{group}", optax.tree.norm(gradients)
            )
            counts = [
                jnp.sum(~jnp.isfinite(gradient)) for gradient in gradients
            ]
            self.add_summary(f"gradient_nonfinite/{group}", sum(counts))
        return super().transform_update(updates)

    def _group_of(self, path: str) -> str | None:
        if not self.config.groups:
            return path
        for pattern, group in self.config.groups:
            if re.fullmatch(pattern, path):
                return group
        return None


class ConditionalUpdateTransformation(UpdateTransformation):
    """Update transformation that skips some steps, with zero deltas and unchanged state."""

    class Config(UpdateTransformation.Config):
        """Configures a ConditionalUpdateTransformation.

        `update_schedule` is a function of the steps so far, or its config; None for always.
        """

        inner: config.Required[config.InstantiableConfig] = config.REQUIRED
        update_schedule: config.ConfigOr[Callable[[Any], Any]] | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child("inner", as_update_transformation(cfg.inner))
        self._update_schedule = config.maybe_instantiate(cfg.update_schedule)

    def init(self, model_params: base.NestedOptParam) -> Any:
        return {
            "inner": self.inner.init(model_params),
            "step": jnp.zeros((), jnp.int32),
        }

    def create_state_partition_specs(
        self, model_param_specs: NestedParameterSpec
    ) -> base.NestedOptStateSpec:
        inner = self.inner.create_state_partition_specs(model_param_specs)
        return {"inner": inner, "step": base.COUNT_SPEC}

    def transform_update(self, updates: Updates) -> Updates:
        step = self.state["step"]
        transformed = self.inner(updates)
        self.add_state_update("step", optax.safe_increment(step))
        if self._update_schedule is None:
            return transformed
        should_update = jnp.asarray(self._update_schedule(step), bool)
        self.add_summary("should_update", should_update)
        # Optimizers are elementwise: a select fuses with them, a conditional would not.
        states = self.get_invocation_context().get_state_updates()
        states["inner"] = clipping.tree_where(
            should_update, states["inner"], self.state["inner"]
        )
        deltas = jax.tree.map(
            lambda delta: jnp.where(should_update, delta, 0),
            transformed.delta_updates,
        )
        # In skipped steps, in-place updates keep the parameters.
        values_before = base.leaves_by_path(updates.param_values())
        values_before |= base.leaves_by_path(updates.inplace_updates)
        inplace_updates = base.leaves_by_path(transformed.inplace_updates)
        for path, value in inplace_updates.items():
            inplace_updates[path] = jnp.where(
                should_update, value, values_before[path]
            )
        return transformed.replace(
            delta_updates=deltas, inplace_updates=_nested(inplace_updates)
        )


def as_update_transformation(
    cfg: config.InstantiableConfig,
) -> UpdateTransformation.Config:
    """Returns the config of an update transformation, made from that of an optimizer if needed."""
    if isinstance(cfg, UpdateTransformation.Config):
        return cfg
    return WrappedPartitionedGradientTransformation.default_config().set(
        transformation=cfg
    )


def _nested(leaves_by_path: dict[tuple[Any, ...], T]) -> dict[str, Any]:
    leaves: dict[tuple[str, ...], T] = {}
    for path, leaf in leaves_by_path.items():
        names = tuple(part.key for part in path)
        leaves[names] = leaf
    return unflatten_dict(leaves)
