"""Trainer of a model on a mesh of devices, with evaluation and checkpoints.

`run` prepares the state (restored or new), compiles the step with the first batch, and then runs it
for each batch. The step updates the state in place; summaries, evaluations and checkpoints follow
if they are due. The order of steps, keys and data depends on the config and the seed alone; an
interrupted run therefore ends with the same bits as an uninterrupted one.

A run whose last step is not saved fails. If the file system refuses a save, for lack of space or
otherwise, that is reported, training continues, and the next save that is due is the next attempt;
the last step gets two attempts. Any other error of a save ends the run.
"""

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from weft import config, errors
from weft.core import axis_rules, tracing
from weft.debug import anomalies, first_nonfinite, lookup_checks
from weft.distributed import cpu_threads, peers, preemption
from weft.distributed.watchdog import Watchdog
from weft.hierarchy import Module, nowrap
from weft.input import Input, PrefetchingIterator
from weft.report import display, live, recorder
from weft.trainer import agreement, profiling, run_dir, state_builder, state_texts
from weft.trainer import mesh as mesh_lib
from weft.trainer import state as state_lib
from weft.trainer.checkpointer import retries
from weft.trainer.checkpointer.checkpointer import BaseCheckpointer, Checkpointer
from weft.trainer.checkpointer.host_state import RunState
from weft.trainer.compilation import compilation_cache, options_for_init, options_for_steps
from weft.trainer.evaler import EarlyStopping, SpmdEvaler, due_at_end, run_evalers
from weft.trainer.learner import BaseLearner, with_precision
from weft.trainer.model import PerParamDType, model_config
from weft.trainer.precision import Precision, as_precision
from weft.trainer.progress import EARLY_STOPPING, MAX_STEP, RunListener, RunListeners, has_ended
from weft.trainer.run_lock import RunLock, run_lock
from weft.trainer.summary_writer.base import BaseWriter, CheckpointerAction, closing_writers
from weft.trainer.summary_writer.files import SummaryWriter
from weft.trainer.train_step import TrainerState, train_step
from weft.trainer.trainer_config_modifier import apply_config_modifiers
from weft.typing import DType, Nested, NestedTensor, PartitionSpec, Tensor

logger = logging.getLogger(__name__)


class SpmdTrainer(Module):
    """Trainer of a model on a mesh of devices.

    `run` initializes or restores the state and trains, with evaluations, checkpoints and summaries
    at the steps that their configs say. `weft.fit` makes the config for data at hand.
    """

    _needs_allow = ("compilation_cache_dir", "status_port")  # programs are code

    class Config(Module.Config):
        """Configures a SpmdTrainer.

        Attributes:
            dir: directory of the run.
            model: the config of a hierarchy layer, or of a class or function that makes a module of
                Linen, NNX or another library. Its call takes a batch and returns a scalar loss and
                auxiliary outputs, see `weft.trainer.model`.
            input: training data; its field `is_training`, if any, is set to True.
            max_step: number of steps; also of the learner's schedules that set none.
            seed: seed of a new run, for the parameters and all steps, if `run` gets no key.
            mesh_shape: number of devices along each axis of the mesh; one may be -1.
            mesh_rules: pairs of a regular expression for hardware and a mesh shape, a config
                modifier, or None; see `select_mesh_config`.
            batch_axis_names: mesh axes over which the rows of a batch are sharded.
            logical_axis_rules: pairs of a name that a layer or module gives to an axis, and the
                mesh axis or axes to shard it over, or None; in order of priority. In hierarchy
                layers a name without a rule is a mesh axis.
            rules_by_kind: such rules for one kind of array, which take precedence.
            evalers: evaluations by name.
            init_state_builder: builds the initial state of a run without a checkpoint, such as
                pretrained parameters; None initializes it randomly.
            early_stopping: ends the run when the metric of an evaler no longer improves.
            throughput: reports speed, MFU and goodput under "throughput"; None for no report.
            precision: policy for the dtypes of parameters, computation and the optimizer's moments:
                "float32", "mixed_bfloat16", "bfloat16", "int8", "fp8", or a `Precision.Config`;
                None for those of the model and the optimizer.
            train_dtype: dtype of the model's computation in training, instead of a policy's; None
                for that of its parameters. May be a function that returns one per parameter, such
                as `per_param_train_dtype_by_path`.
            log_every_n_steps: interval for logging the loss; None for never.
            watchdog_timeout_seconds: time without progress before all threads' stacks are printed.
            crash_on_hang_timeout_seconds: time without progress before the process is ended.
            readiness_timeout_seconds: time that the first of several processes to be ready for its
                first step, or to have restored a checkpoint, waits for the last one.
            status_port: port of a local page with the run's status; 0 for any free one.
            anomaly_policy: policy for steps whose loss is undefined or jumps.
            start_trace_steps: steps at which a profiler trace starts.
            n_steps_for_each_trace: number of steps per trace, 3 if None.
            start_trace_process_indices: processes that trace, or "all".
            host_tracer_level, python_tracer_level: level of detail of traces for the host and for
                Python, 0 for none; None for JAX's default.
            context_manager: entered around the whole run.
            compilation_cache_dir: directory that stores compiled programs for later processes; None
                for that of JAX's setting or else one in the user's cache directory, "" for none;
                see `weft.trainer.compilation`.
            config_modifiers: change this config, in order, before the trainer is made from it.
        """

        dir: config.Required[str] = config.REQUIRED
        model: config.Required[config.InstantiableConfig] = config.REQUIRED
        learner: config.Required[BaseLearner.Config] = config.REQUIRED
        input: config.Required[Input.Config] = config.REQUIRED
        max_step: int | float = math.inf
        seed: int = 0
        mesh_shape: config.Required[mesh_lib.MeshShape | mesh_lib.HybridMeshShape] = config.REQUIRED
        mesh_axis_names: config.Required[Sequence[str]] = config.REQUIRED
        mesh_rules: mesh_lib.MeshRules | None = None
        batch_axis_names: str | Sequence[str] | None = "data"
        logical_axis_rules: mesh_lib.AxisRules = []
        rules_by_kind: mesh_lib.RulesByKind.Config = mesh_lib.RulesByKind.default_config()
        evalers: dict[str, SpmdEvaler.Config] = {}
        checkpointer: BaseCheckpointer.Config = Checkpointer.default_config()
        init_state_builder: state_builder.Builder.Config | None = None
        summary_writer: BaseWriter.Config = SummaryWriter.default_config()
        early_stopping: EarlyStopping.Config | None = None
        throughput: profiling.Throughput.Config | None = profiling.Throughput.default_config()
        precision: str | Precision.Config | None = None
        train_dtype: DType | config.ConfigOr[PerParamDType] | None = None
        log_every_n_steps: int | None = None
        watchdog_timeout_seconds: float | None = None
        crash_on_hang_timeout_seconds: float | None = None
        readiness_timeout_seconds: float = 1800
        status_port: int | None = None
        anomaly_policy: anomalies.AnomalyPolicy.Config | None = None
        start_trace_steps: Sequence[int] = []
        n_steps_for_each_trace: int | None = None
        start_trace_process_indices: Literal["all"] | Sequence[int] = [0]
        host_tracer_level: int | None = None
        python_tracer_level: int | None = None
        context_manager: config.ConfigOr[Callable[[], contextlib.AbstractContextManager]] | None = (
            None
        )
        compilation_cache_dir: str | None = None
        config_modifiers: Sequence[config.ConfigOr[config.ConfigModifier]] = []

        def instantiate(self, **kwargs: Any) -> "SpmdTrainer":
            return Module.Config.instantiate(apply_config_modifiers(self), **kwargs)

    def __init__(self, cfg: Config, *, parent: Module | None, devices: Sequence[Any] | None = None):
        super().__init__(cfg, parent=parent)
        lookup_checks.check_tokens(cfg)
        if not (isinstance(cfg.max_step, int) or cfg.max_step == math.inf) or cfg.max_step < 0:
            raise errors.InvalidConfigValueError(
                f"{self.path()}.max_step={cfg.max_step!r} is not a number of steps; expected an "
                "int such as 1000, or math.inf for a run without end."
            )
        policy = None if cfg.precision is None else as_precision(cfg.precision)
        if policy is not None and None not in (policy.compute_dtype, cfg.train_dtype):
            raise errors.InvalidConfigValueError(
                f"{self.path()} has both precision={cfg.precision!r:.80} and "
                f"train_dtype={cfg.train_dtype!r:.80}, which both set the dtype of the "
                "computation; leave one out, or set precision to a Precision.Config whose "
                "compute_dtype is None."
            )
        self._mesh = mesh_lib.build_mesh(cfg.mesh_shape, cfg.mesh_axis_names, devices)
        self._rules = mesh_lib.rules_of(cfg)
        self._step = 0
        self._state: TrainerState | None = None
        self._batches: PrefetchingIterator | None = None
        self._unsettled: anomalies.Step | None = None  # it may still run
        self._settle: Callable[[], bool] = lambda: False  # set by a run
        self._run_lock: RunLock | None = None
        self._shows_progress = False
        self._failed_saves = 0
        self._max_step, self._log_every_n_steps = cfg.max_step, cfg.log_every_n_steps
        self._evalers: dict[str, SpmdEvaler] = {}
        with self.mesh():
            self._add_child("input", config.maybe_set_config(cfg.input, is_training=True))
            model = model_config(cfg.model, self.input.element_spec, cfg.precision)
            self._add_child("model", model)
            self._add_child("learner", with_precision(run_dir.learner_config(cfg), cfg.precision))
            self._state_specs = state_lib.state_specs(self.model, self.learner, self._rules)
            self._shardings = state_lib.state_shardings(self._mesh, self._state_specs)
            checkpointer = cfg.checkpointer.set(dir=os.path.join(cfg.dir, run_dir.CHECKPOINTS_DIR))
            self._checkpointer: Any = self._add_child("checkpointer", checkpointer)
            if cfg.init_state_builder is not None:
                self._add_child("init_state_builder", cfg.init_state_builder)
            writer = cfg.summary_writer.set(dir=os.path.join(cfg.dir, "summaries/train_train"))
            self._write_summaries: Any = self._add_child("summary_writer", writer)
            for name, evaler in cfg.evalers.items():
                evaler.summary_writer.set(dir=os.path.join(cfg.dir, f"summaries/{name}"))
                self._evalers[name] = self._add_child(  # pyright: ignore[reportArgumentType]
                    name,
                    evaler,
                    model=self.model,
                    model_param_partition_specs=self.trainer_state_partition_specs.model,
                )
        self._train_step: Callable[..., Any] = jit_train_step(self)
        self._checks_loss = not self.learner.handles_undefined_loss()
        self._throughput: profiling.Throughput | None = config.maybe_instantiate(cfg.throughput)
        self._early_stopping: EarlyStopping | None = config.maybe_instantiate(cfg.early_stopping)
        if self._early_stopping is not None:
            self._early_stopping.check(cfg.evalers)
        policies = {f"evalers/{name}": x.eval_policy for name, x in self._evalers.items()}
        policies |= {"early_stopping": self._early_stopping, "anomalies": self._train_step}
        self._run_state = RunState(policies)
        self._traces = profiling.StepTraces(
            cfg.dir,
            cfg.start_trace_steps,
            cfg.n_steps_for_each_trace,
            cfg.start_trace_process_indices,
            host_tracer_level=cfg.host_tracer_level,
            python_tracer_level=cfg.python_tracer_level,
        )

    # The state.

    @nowrap
    @contextlib.contextmanager
    def mesh(self) -> Iterator[None]:
        """Enters the trainer's mesh and its rules for activations."""
        with jax.set_mesh(self._mesh), axis_rules.logical_axis_rules(self._rules.activations):
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
        state_lib.check_memory(self._state_specs, self._shardings, list(self._mesh.devices.flat))
        with self.mesh():
            state = state_builder.initial_state(
                self.children.get("init_state_builder"),  # pyright: ignore[reportArgumentType]
                self._new_state,
                prng_key,
                self._shardings,
                interruptible=self._state is None,  # else a state would be replaced by a new one
                compiler_options=options_for_init(
                    self._mesh.devices.flat[0].platform, self._state_specs
                ),
            )
        self._step, self._state = 0, state

    # The data.

    def _batch_partition(self) -> PartitionSpec:
        return state_lib.batch_partition(self.input, self.config.batch_axis_names)

    def _open_batches(self) -> PrefetchingIterator:
        return state_lib.open_batches(self.input, self._batch_partition(), self._mesh)

    # Checkpoints.

    def _to_save(self, batches: PrefetchingIterator | None, state: TrainerState) -> dict[str, Any]:
        host_state = {
            "input_iter": batches,
            "run_state": self._run_state,
            "next_step": self._step + 1,
        }
        return {**state._asdict(), **host_state}

    @nowrap
    def restore_checkpoint(self, restore_step: int | None = None) -> int | None:
        """Restores the state, and the position in the data if `run` has opened it.

        `restore_step` None is the newest undamaged checkpoint. Returns the restored step, or None
        if there is no checkpoint.
        """
        with self.mesh(), contextlib.ExitStack() as stack:
            stack.enter_context(preemption.barrier_after("restoring the checkpoint"))
            batches = self._batches or stack.enter_context(self._open_batches())
            shapes = jax.eval_shape(self._new_state, jax.random.key(0))
            target = state_lib.with_shardings(shapes, self._shardings)
            step, restored = self._checkpointer.restore(
                step=restore_step, state=self._to_save(batches, target)
            )
            if step is not None:
                self._step = restored["next_step"] - 1
                self._state = TrainerState(**{k: restored[k] for k in TrainerState._fields})
            return step

    @nowrap
    def save_checkpoint(
        self, evaler_summaries: dict[str, Any] | None, *, force: bool = False
    ) -> bool:
        """Passes the state to the checkpointer and returns whether it is saved.

        Args:
            evaler_summaries: from the evalers that ran after this step, for policies that use them.
            force: whether to save even if the policy would not.
        """
        if self._run_lock is not None:
            self._run_lock.check()

        def state() -> dict[str, Any]:
            if self._run_lock is not None:
                self._run_lock.check_now()
            self._settle_first()
            return self._to_save(self._batches, self.trainer_state)

        return self._checkpointer.save(
            step=self._step,
            state=state if isinstance(self._checkpointer, Checkpointer) else state(),  # a user's
            evaler_summaries=evaler_summaries,
            force=force,
        )

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
            if trainer_state is None:
                # The key too: the devices of the mesh may belong to another machine.
                trainer_state = jax.eval_shape(lambda: self._new_state(jax.random.key(0)))
            if input_batch is None:
                input_batch = state_lib.batch_shapes(
                    self.input, self._batch_partition(), self._mesh
                )
            lowered = self._lower_step(trainer_state, input_batch)
            return lowered.compile(compiler_options=compiler_options)

    def _lower_step(self, state: Any, batch: Nested[Any]) -> jax.stages.Lowered:
        traced = self._train_step.trace(state, batch)
        lookup_checks.check_lookups(traced.jaxpr, state, batch, self.config)
        return traced.lower()

    # The run.

    @nowrap
    def model_params_for_eval(self) -> Any:
        """Returns the parameters for evaluation: their moving average if the learner keeps one."""
        ema = getattr(self.trainer_state.learner.get("ema"), "ema", None)
        return self.trainer_state.model if not jax.tree.leaves(ema) else ema

    @nowrap
    @tracing.entry_point
    def run(
        self,
        prng_key: Tensor | None = None,
        *,
        return_evaler_summaries: bool | set[str] | None = None,
        listener: RunListener | None = None,
        progress: bool | display.Display = True,
        recipe: Mapping[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Trains until `max_step`, the end of the data, or a signal to stop.

        A run continues from the checkpoint in its directory, if any, and leaves a `report.html`.

        Args:
            prng_key: key of a new run, instead of that of `seed`.
            return_evaler_summaries: names of evalers to run at the end, or True for all.
            listener: receives the events of the run.
            progress: whether the first process shows the progress on the standard error: drawn in
                place on a terminal and in a notebook, as lines elsewhere. Or the display to use.
            recipe: what made the config, for `run.json`; see `weft.recipes.recipe.Recipe.record`.

        Returns:
            A dict of the "loss" and "aux" of the last step, or None without a step. With
            `return_evaler_summaries`, also the summaries of these evalers by name, as
            "evaler_summaries"; then without a step "loss" and "aux" are None, and the result is
            None if the run was interrupted.

        Raises:
            BatchShardingError: if the batches do not fit the mesh.
            RunDirError: if the directory belongs to another config, or another run is using it.
            RunDirTakenError: if another run has taken the directory while this process was frozen.
            RunDirMovedError: if the directory was renamed or removed during the run.
            UndefinedLossException: if the loss becomes NaN or infinite.
            LossSpikeError: if the loss jumps, and the policy is to stop then.
            CheckpointSaveError: if the last step, or for a reason other than the file system any
                step that was due, could not be saved.
            CheckpointReadError: if the newest checkpoint cannot be read now, but may be undamaged.
            ProcessesNotReadyError: if another process is not ready in time.
            ProcessLostError: if another process ends or fails.
            ProcessesDifferError: if the processes have other configs, code, data or settings.
            ArgumentValueError: if there is no evaler of a name in `return_evaler_summaries`.
        """
        cfg = self.config
        wanted = self._wanted_evalers(return_evaler_summaries)
        with self.mesh():
            state_lib.check_batches(self.input, self._batch_partition())
        with contextlib.ExitStack() as stack:
            self._run_lock = stack.enter_context(run_lock(cfg.dir))
            started_before = run_dir.claim_run_dir(cfg, recipe)
            listener = stack.enter_context(recorder.reported(cfg.dir, progress, listener))
            self._shows_progress = bool(progress) and jax.process_index() == 0
            writers = [self.summary_writer, *(x.summary_writer for x in self._evalers.values())]
            stack.enter_context(closing_writers(writers))
            stop, listener = stack.enter_context(run_context(cfg, listener, lambda: self._step))
            agreement.check_processes_agree(
                stop, cfg, lock=self._run_lock, recipe=recipe, prng_key=prng_key
            )
            if cfg.context_manager is not None:
                stack.enter_context(config.maybe_instantiate(cfg.context_manager)())
            stack.enter_context(self.mesh())
            stack.enter_context(compilation_cache(cfg.compilation_cache_dir))
            self._batches = stack.enter_context(self._open_batches())
            stack.push(self._close)

            first_key = jax.random.key(cfg.seed) if prng_key is None else prng_key
            self._begin(first_key, started_before, listener)
            evaler_summaries, outputs, stopped = self._run_steps(stop, listener, first_key)
            reason = self._end(stopped, wanted, evaler_summaries, listener)
            last = outputs and {"loss": outputs["loss"], "aux": outputs["aux"]}
            if not return_evaler_summaries:
                return last
            if not has_ended(reason):
                return None
            summaries = {name: evaler_summaries[name] for name in self._evalers if name in wanted}
            return {**(last or {"loss": None, "aux": None}), "evaler_summaries": summaries}

    def _end(
        self,
        stopped: preemption.StopRun | None,
        wanted: set[str],
        evaler_summaries: dict[str, Any],
        listener: RunListener,
    ) -> str:
        """Saves, adds the last evaluations to `evaler_summaries`, and returns why the run ends."""
        by_signal = stopped is not None and stopped.request.kind == "signal"
        if self._step or by_signal:
            self._save_last(listener)
        if stopped is not None and stopped.error is not None:
            raise stopped.error
        reason = MAX_STEP if stopped is None else stopped.request.text
        if has_ended(reason):
            missing = (due_at_end(self._evalers) | wanted) - evaler_summaries.keys()
            evaler_summaries |= self._run_evalers(listener, forced=missing)
        listener.on_end(self._step, reason)
        return reason

    def _wanted_evalers(self, names: bool | Collection[str] | None) -> set[str]:
        """Returns the names of evalers whose summaries a run returns."""
        if isinstance(names, bool) or names is None:
            return set(self._evalers) if names else set()
        for name in names:
            if name not in self._evalers:
                raise errors.ArgumentValueError(
                    f"return_evaler_summaries names {name!r}, which is not one of the evalers of "
                    f"{self.path()}. {errors.did_you_mean(name, self._evalers)}"
                )
        return set(names)

    def _begin(self, first_key: Tensor, started_before: bool, listener: RunListener) -> None:
        """Restores or creates the state, and reports the start."""
        if note := mesh_lib.unused_gpu_note():
            logger.warning(note)
        resumed_from = self._restore_or_init(first_key, started_before=started_before)
        self.summary_writer.log_config(self.config, step=self._step)
        if jax.process_index() == 0:
            state_texts.write(self.config.dir, self._state_specs, self.model)
        listener.on_start(self, resumed_from)

    def _restore_or_init(self, first_key: Tensor, *, started_before: bool = True) -> int | None:
        """Returns the step of the restored checkpoint, if any; drops summaries of later steps."""
        resumed_from = self.restore_checkpoint()
        if resumed_from is None:
            self.init(first_key)
        at = {"state": self._state, "action": CheckpointerAction.RESTORE, "step": self._step}
        if started_before:
            checkpoints = os.path.join(self.config.dir, run_dir.CHECKPOINTS_DIR)
            for reporter in (self, *self._evalers.values()):
                reporter.summary_writer.log_checkpoint(checkpoints, **at)
        if self._throughput is not None:
            self._throughput.start(self.config.dir, self._step)
        return resumed_from

    def _run_steps(
        self, stop: preemption.GracefulStop, listener: RunListener, first_key: Tensor
    ) -> tuple[dict[str, Any], dict[str, Any] | None, preemption.StopRun | None]:
        """Runs the remaining steps; an anomaly policy may rewind the last one.

        Returns the last evaluations, the outputs of the last step, and the reason to stop.
        """
        assert self._batches is not None
        step: anomalies.Step | None = None
        evaler_summaries: dict[str, Any] = {}
        first_step = cpu_threads.FirstStepWatch()
        patience: float | None = self.config.readiness_timeout_seconds
        early = self._early_stopping
        settle = self._settle = functools.partial(self._judge_and_report, listener, first_key)
        try:
            while not self._is_done() or (settle() and not self._is_done()):
                stop.doing(f"waiting for the input of step {self._step + 1}")
                doing = f"running step {self._step + 1}"
                with stop.next_batch(self._batches, doing, within_seconds=patience) as batch:
                    if patience is not None:  # the first step
                        stop.doing("compiling the step")
                        stop.compile(self._lower_step(self.trainer_state, batch))
                        patience = None
                        first_step.start()
                step = self._dispatch(batch)
                if not first_step.is_dispatched:
                    first_step.dispatched(step.outputs["loss"])
                if settle():  # the step before was bad, so that this one has changed nothing
                    step = self._dispatch(batch)
                self._unsettled = step
                if not isinstance(self._train_step, anomalies.AnomalyGuard):
                    listener.on_step(*step[:3])
                stop.doing(f"evaluating or saving after step {step.number}")
                with self._throughput.paused() if self._throughput else contextlib.nullcontext():
                    try:
                        if self._evalers:
                            evaler_summaries = self._run_evalers(
                                listener,
                                train_summaries=step.outputs["summaries"],
                                before=self._settle_first,
                            )
                            if evaler_summaries and self._throughput:
                                self._throughput.idle.restart()
                        if early is not None:
                            early(step=step.number, evaler_summaries=evaler_summaries)
                        self._save_if_due(evaler_summaries, listener)
                    except _Rewound:
                        continue
        except preemption.StopRun as stopped:
            settle()
            return evaler_summaries, step and step.outputs, stopped
        except Exception:
            last, self._unsettled = self._unsettled, None
            if last is not None:
                with contextlib.suppress(Exception):  # the first error counts
                    self._report(last)
            raise
        finally:
            first_step.close()
        is_early = early is not None and early.should_stop
        stopped = preemption.StopRun(peers.StopRequest("end", EARLY_STOPPING)) if is_early else None
        return evaler_summaries, step and step.outputs, stopped

    def _is_done(self) -> bool:
        early = self._early_stopping
        return self._step >= self._max_step or bool(early and early.should_stop)

    def _dispatch(self, batch: NestedTensor) -> anomalies.Step:
        """Starts the next step."""
        number = self._step + 1
        idle = self._throughput.idle if self._throughput and self._throughput.idle else None
        if idle is not None:
            idle.on_dispatch()
        self._traces.before(number)
        self._state, outputs = self._train_step(self._state, batch)
        self._step = number
        self._traces.after(number, outputs)
        if idle is not None:
            idle.on_dispatched(outputs["loss"])
        return anomalies.Step(number, outputs, batch, outputs.pop("verdict", None))

    def _judge_and_report(self, listener: RunListener, first_key: Tensor) -> bool:
        """Judges and reports the last step that was not; it waits for it, while the next one runs.

        Returns whether the anomaly policy handled it as a bad one.
        """
        step, self._unsettled = self._unsettled, None
        if step is None:
            return False
        is_bad, interval = False, self._log_every_n_steps or 10
        if isinstance(self._train_step, anomalies.AnomalyGuard):
            if is_bad := self._train_step.is_bad(step):
                self._step = step.number
                if self._train_step.must_rewind(step, self.trainer_state):
                    self._rewind(first_key)
                    return True
            listener.on_step(*step[:3])
        elif self._checks_loss and (step.number == 1 or step.number % interval == 0):
            self._check_loss(step, first_key)
        self._report(step)
        return is_bad

    def _settle_first(self) -> None:
        """Settles the last step before it is evaluated or saved; raises `_Rewound`."""
        before = self._step
        self._settle()
        if self._step != before:
            raise _Rewound

    def _check_loss(self, step: anomalies.Step, first_key: Tensor) -> None:
        """Raises an error if the loss ends the run."""
        number, outputs, batch, _ = step

        def look_first() -> str:
            if number > 1:
                return anomalies.advice_for_later_step(outputs["summaries"], batch)
            self._state = None  # frees its memory
            self.init(first_key)
            search = first_nonfinite.NonfiniteSearch(self._train_step.__wrapped__)
            state, dtype = self.trainer_state, config.maybe_instantiate(self.config.train_dtype)
            find_module = functools.partial(search.first_module, state, batch)
            return anomalies.advice_for_first_step(find_module, state, batch, dtype)

        anomalies.check_loss(outputs["loss"], number, look_first)

    def _report(self, step: anomalies.Step) -> None:
        loss = step.outputs["loss"]
        summaries = {"loss": loss, **step.outputs["summaries"]}
        if self._throughput is not None and self._throughput.is_due(step.number):
            assert self._batches is not None
            summaries["throughput"] = self._throughput.on_step(
                step.number,
                loss,
                step.batch,
                model=self.model,
                params=self.trainer_state.model,
                input_wait_seconds=self._batches.wait_seconds,
            )
        self._write_summaries(step.number, summaries)
        if self._log_every_n_steps and step.number % self._log_every_n_steps == 0:
            logger.info("step %d: loss %.4f", step.number, float(loss))

    def _rewind(self, first_key: Tensor) -> None:
        """Returns to the last checkpoint, or to the start, but not in the data."""
        assert self._batches is not None
        position = self._batches.get_state()
        self._checkpointer.wait_until_finished()
        self._restore_or_init(first_key)
        self._batches.set_state(position)

    def _run_evalers(self, listener: RunListener, **which: Any) -> dict[str, Any]:
        return run_evalers(
            self._evalers,
            step=self._step,
            prng_key=jax.random.fold_in(self.trainer_state.prng_key, 0),
            model_params=self.model_params_for_eval(),
            listener=listener,
            **which,
        )

    def _save_if_due(self, evaler_summaries: dict[str, Any], listener: RunListener) -> None:
        try:
            if self.save_checkpoint(evaler_summaries):
                self._on_saved(listener)
        except errors.CheckpointSaveError as error:
            self._on_save_failed(error, listener)

    def _save_last(self, listener: RunListener) -> None:
        def save() -> bool:
            is_new = self.save_checkpoint(None, force=True)
            self._checkpointer.wait_until_finished()
            return is_new

        failures: list[errors.CheckpointSaveError] = []
        for seconds in (0.0, *retries.PAUSES_SECONDS):
            time.sleep(seconds)
            try:
                is_new = save()
            except errors.CheckpointSaveError as error:
                if not failures:  # of this save or of an earlier one
                    self._on_save_failed(error, listener)
                if not error.of_file_system:
                    raise
                failures.append(error)
            else:
                if is_new:
                    self._on_saved(listener)
                return
        raise failures[-1]

    def _on_saved(self, listener: RunListener) -> None:
        if self._throughput is not None:
            self._throughput.on_checkpoint(self._step, self._state)
        listener.on_checkpoint(self._step)

    def _on_save_failed(self, error: errors.CheckpointSaveError, listener: RunListener) -> None:
        """Reports that the file system refuses a checkpoint; raises other errors."""
        if not error.of_file_system:
            raise error
        if not self._shows_progress:
            logger.error("%s Training continues from step %d.", error, self._step)
        self._failed_saves += 1
        self._write_summaries(self._step, {"failed_saves": self._failed_saves})
        listener.on_save_failed(self._step, error)

    def _close(self, *exc_info: Any) -> None:
        self._traces.close()
        if self._throughput is not None:
            self._throughput.idle.discard()
        self._checkpointer.stop(has_exception=exc_info[0] is not None)
        self._batches = None


class _Rewound(Exception):
    """A step that was due for an evaluation or a save was bad, and the state is an earlier one."""


@contextlib.contextmanager
def run_context(
    cfg: config.ConfigBase, listener: RunListener, step: Callable[[], int] = lambda: 0
) -> Iterator[tuple[preemption.GracefulStop, RunListener]]:
    """Supervises a run while open; ends quietly if asked to stop before or after its steps.

    Yields the object that decides when to stop, and the listener for the run. `step` returns the
    run's last step.
    """
    limits = (cfg.watchdog_timeout_seconds, cfg.crash_on_hang_timeout_seconds)
    with (
        Watchdog(*limits) as watchdog,
        live.status_page(cfg.status_port, watchdog) as status,
        preemption.graceful_stop(watchdog.report, cfg.readiness_timeout_seconds) as stop,
    ):
        # Wait for all processes before the first collective, which would block without a message.
        # A request to stop is handled before the first step.
        stop.agreed("preparing the state", within_seconds=cfg.readiness_timeout_seconds)
        listener = listener if status is None else RunListeners([listener, status])
        try:
            yield stop, listener
        except preemption.StopRun as stopped:  # nothing to save, or already saved
            if stopped.error is not None:
                raise stopped.error from None
            listener.on_end(step(), stopped.request.text)


def jit_train_step(trainer: SpmdTrainer) -> Any:
    """Returns the jitted step of a trainer, which donates the state to the next one.

    Raises:
        MeshError: if a gradient does not fit the mesh; the message names it.
    """
    cfg, mesh, model_specs = trainer.config, trainer._mesh, trainer._state_specs.model
    gradient_specs = state_lib.parameter_specs(trainer.model, trainer._rules.gradients)
    state_lib.state_shardings(mesh, {"gradients": gradient_specs})
    dtype = config.maybe_instantiate(cfg.train_dtype)
    step = functools.partial(
        train_step,
        model=trainer.model,
        learner=trainer.learner,
        input_=trainer.input,
        model_specs=model_specs,
        gradient_specs=gradient_specs,
        train_dtype=dtype,
    )
    platform, batch = mesh.devices.flat[0].platform, trainer.input.element_spec
    options = options_for_steps(platform, model_specs, batch, cfg.max_step)
    if cfg.anomaly_policy is not None:
        policy = cfg.anomaly_policy.instantiate()
        return anomalies.AnomalyGuard(policy, step, trainer._shardings, mesh, dtype, options)
    layout = (trainer._shardings, None)
    return jax.jit(
        step, in_shardings=layout, out_shardings=layout, donate_argnums=0, compiler_options=options
    )
