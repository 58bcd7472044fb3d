"""Base of the trainer: model, learner, their state, and the compiled step on a mesh of devices."""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from weft import config, errors
from weft.core import axis_rules, spmd
from weft.debug import anomalies, first_nonfinite, lookup_checks
from weft.distributed import preemption
from weft.hierarchy import Module, nowrap
from weft.hierarchy.lora import adapter_state
from weft.input import Input, PrefetchingIterator
from weft.input.base import global_batch_size_of
from weft.trainer import compilation, frozen_base, run_dir, state_builder
from weft.trainer import mesh as mesh_lib
from weft.trainer import state as state_lib
from weft.trainer.checkpointer.checkpointer import (
    BaseCheckpointer,
    Checkpointer,
)
from weft.trainer.checkpointer.host_state import RunState
from weft.trainer.compilation import options_for_init, options_for_steps
from weft.trainer.flops import FLOPS_OF_STEPS, forward_flops, jaxpr_flops
from weft.trainer.gradients import num_microbatches
from weft.trainer.learner import BaseLearner, with_precision
from weft.trainer.model import PerParamDType, model_config
from weft.trainer.precision import Precision, as_precision
from weft.trainer.run_lock import RunLock
from weft.trainer.train_step import BatchTransform, TrainerState, train_step
from weft.trainer.trainer_config_modifier import apply_config_modifiers
from weft.typing import DType, Nested, NestedTensor, PartitionSpec, Tensor


class BaseTrainer(Module):
    """Model and learner on a mesh of devices, with their state and the step that changes it."""

    class Config(Module.Config):
        """Configures a BaseTrainer."""

        dir: config.Required[str] = config.REQUIRED
        """Directory of the run."""
        model: config.Required[config.InstantiableConfig] = config.REQUIRED
        """The config of a hierarchy layer, or of a class or function that makes a module of Linen,
        NNX or another library. Its call takes a batch and returns a scalar loss and auxiliary
        outputs, see `weft.trainer.model`."""
        learner: config.Required[config.InstantiableConfig[BaseLearner]] = (
            config.REQUIRED
        )
        input: config.Required[Input.Config] = config.REQUIRED
        """Training data; its field `is_training`, if any, is set to True."""
        max_step: int | float = math.inf
        """Number of steps; also of the learner's schedules that set none."""
        mesh_shape: config.Required[
            mesh_lib.MeshShape | mesh_lib.HybridMeshShape
        ] = config.REQUIRED
        """Number of devices along each axis of the mesh; one may be -1."""
        mesh_axis_names: config.Required[Sequence[str]] = config.REQUIRED
        mesh_rules: mesh_lib.MeshRules | None = None
        """Pairs of a regular expression for hardware and a mesh shape, a config modifier, or None;
        see `select_mesh_config`."""
        batch_axis_names: str | Sequence[str] | None = "data"
        """Mesh axes over which the rows of a batch are sharded."""
        logical_axis_rules: mesh_lib.AxisRules = []
        """Pairs of a name that a layer or module gives to an axis, and the mesh axis or axes to
        shard it over, or None; in order of priority. In hierarchy layers a name without a rule is a
        mesh axis."""
        rules_by_kind: mesh_lib.RulesByKind.Config = (
            mesh_lib.RulesByKind.default_config()
        )
        """Such rules for one kind of array, which take precedence."""
        checkpointer: BaseCheckpointer.Config = Checkpointer.default_config()
        init_state_builder: state_builder.Builder.Config | None = None
        """Builds the initial state of a run without a checkpoint, such as pretrained parameters;
        None initializes it randomly."""
        precision: str | Precision.Config | None = None
        """Policy for the dtypes of parameters, computation and the optimizer's moments: "float32",
        "mixed_bfloat16", "bfloat16", "int8", "fp8", or a `Precision.Config`; None for those of the
        model and the optimizer."""
        batch_transform: config.ConfigOr[BatchTransform] | None = None
        """Function of a batch and a PRNG key that returns another batch of the same shapes, called
        at each step of training, as for augmentation; or its config."""
        train_dtype: DType | config.ConfigOr[PerParamDType] | None = None
        """Dtype of the model's computation in training, instead of a policy's; None for that of its
        parameters. May be a function that returns one per parameter, such as
        `per_param_train_dtype_by_path`."""
        anomaly_policy: anomalies.AnomalyPolicy.Config | None = None
        """Policy for steps whose loss is undefined or jumps."""
        xla_options: Sequence[str] = []
        """Names of options with which XLA compiles the step for the devices of the mesh: some of
        "latency_hiding", "collective_matmul", "no_collective_matmul" and "collective_fusion", see
        `weft.trainer.compilation.XLA_OPTIONS`."""
        config_modifiers: Sequence[config.ConfigOr[config.ConfigModifier]] = []
        """Change this config, in order, before the trainer is made from it."""

        def instantiate(self, **kwargs: Any) -> Any:
            return Module.Config.instantiate(
                apply_config_modifiers(self), **kwargs
            )

    def __init__(
        self,
        cfg: Config,
        *,
        parent: Module | None,
        devices: Sequence[Any] | None = None,
    ):
        super().__init__(cfg, parent=parent)
        lookup_checks.check_tokens(cfg)
        _check_config(cfg, self.path())
        self._mesh = mesh_lib.build_mesh(
            cfg.mesh_shape, cfg.mesh_axis_names, devices
        )
        self._rules = mesh_lib.rules_of(cfg)
        self._step = 0
        self._state: TrainerState | None = None
        with self.mesh():
            self._add_child(
                "input", config.maybe_set_config(cfg.input, is_training=True)
            )
            model = model_config(
                cfg.model, self.input.element_spec, cfg.precision
            )
            self._add_child("model", model)
            learner = run_dir.learner_config(cfg)
            self._add_child("learner", with_precision(learner, cfg.precision))
            self._state_specs = state_lib.state_specs(
                self.model, self.learner, self._rules
            )
            self._shardings = state_lib.state_shardings(
                self._mesh, self._state_specs
            )
            checkpointer = cfg.checkpointer.set(
                dir=os.path.join(cfg.dir, run_dir.CHECKPOINTS_DIR)
            )
            self._checkpointer: Any = self._add_child(
                "checkpointer", checkpointer
            )
            if cfg.init_state_builder is not None:
                self._add_child("init_state_builder", cfg.init_state_builder)
        self._frozen_base = frozen_base.frozen_base_of(
            self.children.get("init_state_builder"),
            self._state_specs.model,
            self.learner.should_update_with_optimizers(self._state_specs.model),
        )
        self._train_step: Callable[..., Any] = jit_train_step(self)
        # Of a run: the states that are saved besides that of the model, its place in the data, and
        # its hold on the directory.
        self._run_state = RunState({"anomalies": self._train_step})
        self._batches: PrefetchingIterator | None = None
        self._run_lock: RunLock | None = None

    # The state.

    @nowrap
    @contextlib.contextmanager
    def mesh(self) -> Iterator[None]:
        """Enters the trainer's mesh and its rules for activations."""
        with (
            jax.set_mesh(self._mesh),
            axis_rules.logical_axis_rules(self._rules.activations),
            # A restart may have a number of processes that does not divide the batch.
            spmd.uneven_rows(jax.process_count() > 1),
        ):
            yield

    @property
    def step(self) -> int:
        """Number of steps that were run."""
        return self._step

    @property
    def trainer_state(self) -> TrainerState:
        """Current state; None before `init` or `restore_checkpoint`."""
        return self._state  # pyright: ignore[reportReturnType]

    @property
    def trainer_state_specs(self) -> TrainerState:
        """Shapes, dtypes and layouts of the state."""
        return self._state_specs

    @property
    def trainer_state_partition_specs(self) -> TrainerState:
        """Layouts of the state."""
        return state_lib.partition_specs(self._state_specs)

    @property
    def _new_state(self) -> Callable[[Tensor], TrainerState]:
        # Not a method: JAX gives what it compiles the name of `new_state`.
        return functools.partial(
            state_lib.new_state,
            model=self.model,
            learner=self.learner,
            model_specs=self._state_specs.model,
        )

    @nowrap
    def init(self, prng_key: Tensor) -> None:
        """Initializes or builds a new state, each array on the devices that hold it.

        The key is for the parameters and all steps.
        """
        devices = list(self._mesh.devices.flat)
        state_lib.check_memory(self._state_specs, self._shardings, devices)
        with self.mesh():
            state = state_builder.initial_state(
                self.children.get("init_state_builder"),  # pyright: ignore[reportArgumentType]
                self._new_state,
                prng_key,
                self._shardings,
                interruptible=self._state
                is None,  # else a state would be replaced by a new one
                compiler_options=options_for_init(
                    devices[0].platform, self._state_specs
                ),
            )
        self._step, self._state = 0, state

    @nowrap
    def model_params_for_eval(self) -> NestedTensor:
        """Returns the parameters for evaluation: their moving average if the learner keeps one."""
        average: Any = getattr(
            self.trainer_state.learner.get("ema"), "ema", None
        )
        if not jax.tree.leaves(average):
            return self.trainer_state.model
        return average

    # The data.

    def _batch_partition(self) -> PartitionSpec:
        return state_lib.batch_partition(
            self.input, self.config.batch_axis_names
        )

    def _open_batches(self) -> PrefetchingIterator:
        return state_lib.open_batches(
            self.input, self._batch_partition(), self._mesh
        )

    @nowrap
    def _layout(self) -> dict[str, Any]:
        """Returns how a batch is split, for the record of a start."""
        cfg = self.config
        sizes = [
            f"{name}={size}"
            for name, size in self._mesh.shape.items()
            if size > 1
        ]
        layout: dict[str, Any] = {"mesh": ", ".join(sizes) or "one device"}
        rows = global_batch_size_of(cfg.input)
        if rows is None:
            return layout
        with self.mesh():
            num_parts = spmd.num_parts(cfg.batch_axis_names)
            number = 1
            accumulation: Any = getattr(
                cfg.learner, "forward_fn_transformation", None
            )
            if hasattr(accumulation, "max_rows_per_device"):
                number = num_microbatches(
                    rows,
                    accumulation.steps,
                    accumulation.max_rows_per_device,
                    accumulation.batch_axis_names,
                )
        rows_per_device = -(-rows // (number * num_parts))
        return layout | {
            "rows_per_device": rows_per_device,
            "microbatches": number,
        }

    @property
    def input_wait_seconds(self) -> float:
        """Time that the run has waited for batches."""
        if self._batches is None:
            return 0.0
        return self._batches.wait_seconds

    @property
    def last_sign_of_life(self) -> float | None:
        """Time of the last sign of life of the start before, if that was killed."""
        return self._run_lock and self._run_lock.last_sign_of_life

    # Checkpoints.

    def _checkpoint_state(
        self, batches: PrefetchingIterator | None, state: TrainerState
    ) -> dict[str, Any]:
        """Returns what a checkpoint holds, by the names of its parts."""
        parts = {
            **state._asdict(),
            "input_iter": batches,
            "run_state": self._run_state,
            "next_step": self._step + 1,
        }
        if self._frozen_base is not None:
            parts["model"] = adapter_state(state.model)
            parts[frozen_base.BASE] = self._frozen_base
        return parts

    @nowrap
    def restore_checkpoint(self, restore_step: int | None = None) -> int | None:
        """Restores the state, and the position in the data if `run` has opened it.

        `restore_step` None is the newest undamaged checkpoint. Returns the restored step, or None
        if there is no checkpoint.
        """
        with self.mesh(), contextlib.ExitStack() as stack:
            stack.enter_context(
                preemption.barrier_after("restoring the checkpoint")
            )
            batches = self._batches or stack.enter_context(self._open_batches())
            shapes = jax.eval_shape(self._new_state, jax.random.key(0))
            target = state_lib.with_shardings(shapes, self._shardings)
            step, restored = self.checkpointer.restore(
                step=restore_step, state=self._checkpoint_state(batches, target)
            )
            if step is not None:
                self._step = restored["next_step"] - 1
                if self._frozen_base is not None:
                    restored["model"] = self._frozen_base.complete(
                        restored["model"], like=target.model
                    )
                self._state = TrainerState(
                    prng_key=restored["prng_key"],
                    model=restored["model"],
                    learner=restored["learner"],
                )
            return step

    @nowrap
    def save_checkpoint(
        self, evaler_summaries: dict[str, Any] | None, *, force: bool = False
    ) -> bool:
        """Passes the state to the checkpointer, whose policy decides, and returns whether it saves.

        Args:
            evaler_summaries: from the evalers that ran after this step, for policies that use them.
            force: whether to save even if the policy would not.
        """
        if self._run_lock is not None:
            self._run_lock.check()
        state: Any = self._state_to_save
        if not isinstance(
            self._checkpointer, Checkpointer
        ):  # a user's, which takes the state
            state = state()
            if state is None:
                return False
        return self._checkpointer.save(
            step=self._step,
            state=state,
            evaler_summaries=evaler_summaries,
            force=force,
        )

    def _state_to_save(self) -> dict[str, Any] | None:
        """Returns the state that is due to be saved; None if it was bad, and is an earlier one."""
        if self._run_lock is not None:
            self._run_lock.check_now()
        if not self.settle():
            return None
        return self._checkpoint_state(self._batches, self.trainer_state)

    # The step.

    @nowrap
    def compile_train_step(
        self,
        *,
        trainer_state: TrainerState | None = None,
        input_batch: Nested[Any] | None = None,
        compiler_options: dict[str, Any] | None = None,
    ) -> jax.stages.Compiled:
        """Compiles the step ahead of time, with options for XLA.

        The state and batch are arrays or their shapes; None for those of the config.
        """
        with self.mesh():
            state, batch = self._step_shapes()
            if trainer_state is not None:
                state = trainer_state
            if input_batch is not None:
                batch = input_batch
            traced = self.trace_train_step(state, batch)
            compiled = traced.lower().compile(compiler_options=compiler_options)
            flops = jaxpr_flops(traced.jaxpr) / self._mesh.size
            FLOPS_OF_STEPS[compiled] = flops
            return compiled

    @nowrap
    def train_step_flops(self) -> int:
        """Counts the operations of a step, with those that are recomputed, on all devices."""
        with self.mesh():
            traced = self.trace_train_step(*self._step_shapes())
        return jaxpr_flops(traced.jaxpr)

    @nowrap
    def model_flops(self) -> int:
        """Counts the operations that a step needs, without those that are recomputed."""
        with self.mesh():
            state, batch = self._step_shapes()
            # The backward pass takes twice the operations of the forward pass.
            return 3 * forward_flops(self.model, state.model, batch)

    def _step_shapes(self) -> tuple[TrainerState, Nested[Any]]:
        """Returns the shapes of the state and of a batch, from the config."""
        # The key too: the devices of the mesh may belong to another machine.
        state = jax.eval_shape(lambda: self._new_state(jax.random.key(0)))
        batch = state_lib.batch_shapes(
            self.input, self._batch_partition(), self._mesh
        )
        return state, batch

    @nowrap
    def trace_train_step(
        self, state: TrainerState, batch: Nested[Any]
    ) -> jax.stages.Traced:
        """Traces the step for a state and a batch, and checks its lookups in tables."""
        try:
            traced = self._train_step.trace(state, batch)
        except ValueError as error:
            self._explain_uneven_rows(error)
            raise
        lookup_checks.check_lookups(traced.jaxpr, state, batch, self.config)
        return traced

    def _explain_uneven_rows(self, error: ValueError) -> None:
        """Raises an InputDispatchError if a `jax.shard_map` refuses rows that do not divide."""
        rows = global_batch_size_of(self.config.input)
        num_parts = spmd.num_parts(self.config.batch_axis_names)
        if rows is None or rows % num_parts == 0:
            return
        if "not evenly divisible" not in str(error):
            return
        num_processes = jax.process_count()
        advice = f"set global_batch_size to a multiple of {num_parts}"
        if num_processes > 1:
            fewer = max(n for n in range(1, num_processes) if rows % n == 0)
            advice = f"start {fewer} process(es), or {advice}"
        raise errors.InputDispatchError(
            f"a batch of {rows} rows does not divide over {num_parts} devices, and a layer of "
            "the model needs parts of equal size, such as a mixture of experts that drops no "
            f"tokens; {advice}."
        ) from error

    @nowrap
    def advance(self, batch: NestedTensor) -> dict[str, Any]:
        """Dispatches the next step, and returns its outputs."""
        self._state, outputs = self._train_step(
            self._state, self.batch_of_step(batch)
        )
        self._step += 1
        return outputs

    @nowrap
    def batch_of_step(self, batch: NestedTensor) -> NestedTensor:
        """Returns the batch that the compiled step takes, from one of the input: the same.

        A trainer that makes it with the model, such as answers to prompts, overrides this and
        `trace_train_step`. It is a function of the batch and of the state before the step.
        """
        return batch

    @nowrap
    def go_back_to(self, step: int) -> None:
        """Sets the number of the last step, after steps that have changed nothing."""
        self._step = step

    @nowrap
    def settle(self) -> bool:
        """Judges the last step of a run; returns whether the state is still that after it."""
        return True


def _check_config(cfg: BaseTrainer.Config, path: str) -> None:
    if (
        not (isinstance(cfg.max_step, int) or cfg.max_step == math.inf)
        or cfg.max_step < 0
    ):
        raise errors.InvalidConfigValueError(
            f"{path}.max_step={cfg.max_step!r} is not a number of steps; expected an int such as "
            "1000, or math.inf for a run without end."
        )
    compilation.check_options(cfg.xla_options, f"{path}.xla_options")
    if cfg.precision is None or cfg.train_dtype is None:
        return
    if as_precision(cfg.precision).compute_dtype is not None:
        raise errors.InvalidConfigValueError(
            f"{path} has both precision={cfg.precision!r:.80} and "
            f"train_dtype={cfg.train_dtype!r:.80}, which both set the dtype of the computation; "
            "leave one out, or set precision to a Precision.Config whose compute_dtype is None."
        )


def jit_train_step(trainer: BaseTrainer) -> Any:
    """Returns the jitted step of a trainer, which donates the state to the next one.

    Raises:
        MeshError: if a gradient does not fit the mesh; the message names it.
    """
    cfg = trainer.config
    mesh = trainer._mesh
    model_specs = trainer._state_specs.model
    with jax.set_mesh(mesh):
        gradient_specs = state_lib.parameter_specs(
            trainer.model, trainer._rules.gradients
        )
    state_lib.state_shardings(
        mesh, {"gradients": gradient_specs}
    )  # raises if one does not fit
    dtype = config.maybe_instantiate(cfg.train_dtype)
    step = functools.partial(
        train_step,
        model=trainer.model,
        learner=trainer.learner,
        input_=trainer.input,
        model_specs=model_specs,
        gradient_specs=gradient_specs,
        train_dtype=dtype,
        batch_axis_names=cfg.batch_axis_names,
        batch_transform=config.maybe_instantiate(cfg.batch_transform),
    )
    platform = mesh.devices.flat[0].platform
    options = options_for_steps(
        platform, model_specs, trainer.input.element_spec, cfg.max_step
    )
    options = {
        **(options or {}),
        **compilation.named_options(cfg.xla_options, platform),
    }
    if cfg.anomaly_policy is not None:
        policy = cfg.anomaly_policy.instantiate()
        return anomalies.AnomalyGuard(
            policy, step, trainer._shardings, mesh, dtype, options or None
        )
    shardings = (
        trainer._shardings,
        None,
    )  # batches come laid out, outputs are left to XLA
    return jax.jit(
        step,
        in_shardings=shardings,
        out_shardings=shardings,
        donate_argnums=0,
        compiler_options=options or None,
    )


def judge_of(
    trainer: BaseTrainer, first_key: Tensor, every_n_steps: int | None
) -> anomalies.Judge:
    """Returns the judge of a trainer's steps; `first_key` is that of its initial state.

    `every_n_steps` is how often the loss is read, if there is no policy; 10 if None.
    """
    if isinstance(trainer._train_step, anomalies.AnomalyGuard):
        return trainer._train_step
    if trainer.learner.handles_undefined_loss():
        return anomalies.NoCheck()
    advise = functools.partial(_advise, trainer, first_key)
    return anomalies.LossCheck(every_n_steps or 10, advise)


def _advise(
    trainer: BaseTrainer, first_key: Tensor, step: anomalies.Step
) -> str:
    """Returns what to look at first after a step with an undefined loss."""
    if step.number > 1:
        return anomalies.advice_for_later_step(
            step.outputs["summaries"], step.batch
        )
    trainer._state = None  # frees its memory
    trainer.init(first_key)
    state = trainer.trainer_state
    search = first_nonfinite.NonfiniteSearch(trainer._train_step.__wrapped__)
    batch = trainer.batch_of_step(step.batch)
    find_module = functools.partial(search.first_module, state, batch)
    dtype = config.maybe_instantiate(trainer.config.train_dtype)
    return anomalies.advice_for_first_step(find_module, state, batch, dtype)
