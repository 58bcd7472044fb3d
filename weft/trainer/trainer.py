"""Trainer of a model on a mesh of devices, with evaluation and checkpoints.

`run` restores or creates the state, and passes it to the loop, `weft.trainer.loop`. What happens
besides training is up to hooks; `SpmdTrainer._hooks_of_run` has their order. The order of steps,
keys and data depends on the config and the seed alone; an interrupted run therefore ends with the
same bits as an uninterrupted one.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax

from weft import config
from weft.core import tracing
from weft.distributed import preemption
from weft.distributed.watchdog import Watchdog
from weft.errors import RunDirError
from weft.hierarchy import Module, nowrap
from weft.report import display, live, recorder
from weft.trainer import agreement, profiling, run_dir, state_texts
from weft.trainer import mesh as mesh_lib
from weft.trainer import state as state_lib
from weft.trainer.base import BaseTrainer, judge_of
from weft.trainer.checkpointer.checkpointer import Checkpointer
from weft.trainer.checkpointer.host_state import RunState
from weft.trainer.checkpointer.saving import CheckpointHook
from weft.trainer.compilation import compilation_cache
from weft.trainer.evaler import (
    EarlyStopping,
    EvaluationHook,
    SpmdEvaler,
    names_to_return,
)
from weft.trainer.hooks import (
    MAX_STEP,
    Hook,
    Hooks,
    as_hooks,
    check_hook,
    has_ended,
)
from weft.trainer.loop import TrainingLoop
from weft.trainer.run_lock import run_lock
from weft.trainer.summary_writer.base import (
    BaseWriter,
    CheckpointerAction,
    SummaryHook,
    closing_writers,
)
from weft.trainer.summary_writer.files import SummaryWriter
from weft.trainer.throughput import Throughput
from weft.trainer.trained_model import batch_record
from weft.typing import Tensor

logger = logging.getLogger(__name__)


class SpmdTrainer(BaseTrainer):
    """Trainer of a model on a mesh of devices.

    `run` initializes or restores the state and trains, with evaluations, checkpoints and summaries
    at the steps that their configs say. `weft.fit` makes the config for data at hand.
    """

    _needs_allow = ("compilation_cache_dir", "status_port")  # programs are code

    class Config(BaseTrainer.Config):
        """Configures a SpmdTrainer."""

        seed: int = 0
        """Seed of a new run, for the parameters and all steps, if `run` gets no key."""
        evalers: dict[str, SpmdEvaler.Config] = {}
        """Evaluations by name. A required `max_step` of a policy may stay unset, and is then that
        of the run."""
        hooks: dict[str, config.InstantiableConfig[Hook]] = {}
        """Hooks by name, in the order in which they are called."""
        summary_writer: BaseWriter.Config = SummaryWriter.default_config()
        early_stopping: EarlyStopping.Config | None = None
        """Ends the run when the metric of an evaler no longer improves."""
        throughput: Throughput.Config | None = Throughput.default_config()
        """Reports speed, MFU and goodput under "throughput"; None for no report."""
        log_every_n_steps: int | None = None
        """Interval for logging the loss; None for never."""
        watchdog_timeout_seconds: float | None = None
        """Time without progress before all threads' stacks are printed."""
        crash_on_hang_timeout_seconds: float | None = None
        """Time without progress before the process is ended."""
        readiness_timeout_seconds: float = 1800
        """Time that the first of several processes to be ready for its first step, or to have
        restored a checkpoint, waits for the last one."""
        status_port: int | None = None
        """Port of a local page with the run's status; 0 for any free one."""
        start_trace_steps: Sequence[int] = []
        """Steps at which a profiler trace starts."""
        n_steps_for_each_trace: int | None = None
        """Number of steps per trace, 3 if None."""
        start_trace_process_indices: Literal["all"] | Sequence[int] = [0]
        """Processes that trace, or "all"."""
        host_tracer_level: int | None = None
        """Level of detail of traces for the host, 0 for none; None for JAX's default."""
        python_tracer_level: int | None = None
        """The same for Python."""
        context_manager: (
            config.ConfigOr[
                Callable[[], contextlib.AbstractContextManager[Any]]
            ]
            | None
        ) = None
        """Entered around the whole run."""
        compilation_cache_dir: str | None = None
        """Directory that stores compiled programs for later processes; None for that of JAX's
        setting or else one in the user's cache directory, "" for none; see
        `weft.trainer.compilation`."""

        def instantiate(self, **kwargs: Any) -> "SpmdTrainer":
            return super().instantiate(**kwargs)

    def __init__(
        self,
        cfg: Config,
        *,
        parent: Module | None,
        devices: Sequence[Any] | None = None,
    ):
        super().__init__(cfg, parent=parent, devices=devices)
        self._evalers: dict[str, SpmdEvaler] = {}
        with self.mesh():
            writer = cfg.summary_writer.set(
                dir=os.path.join(cfg.dir, "summaries/train_train")
            )
            self._add_child("summary_writer", writer)
            for name, evaler in cfg.evalers.items():
                evaler.summary_writer.set(
                    dir=os.path.join(cfg.dir, f"summaries/{name}")
                )
                self._evalers[name] = self._add_child(  # pyright: ignore[reportArgumentType]
                    name,
                    run_dir.with_length(evaler, cfg.max_step),
                    model=self.model,
                    model_param_partition_specs=self.trainer_state_partition_specs.model,
                )
        self._throughput: Throughput | None = config.maybe_instantiate(
            cfg.throughput
        )
        self._early_stopping: EarlyStopping | None = config.maybe_instantiate(
            cfg.early_stopping
        )
        if self._early_stopping is not None:
            self._early_stopping.check(cfg.evalers)
        self._traces = profiling.StepTraces(
            cfg.dir,
            cfg.start_trace_steps,
            cfg.n_steps_for_each_trace,
            cfg.start_trace_process_indices,
            host_tracer_level=cfg.host_tracer_level,
            python_tracer_level=cfg.python_tracer_level,
        )
        self._configured_hooks: dict[str, Hook] = {}
        # Objects with state that checkpoints hold besides the model's and the learner's, by name.
        self._savable: dict[str, object] = {
            "early_stopping": self._early_stopping,
            "anomalies": self._train_step,
        }
        for name, evaler in self._evalers.items():
            self._savable[f"evalers/{name}"] = evaler.eval_policy
        for name, hook_config in cfg.hooks.items():
            hook = config.maybe_instantiate(hook_config)
            self._configured_hooks[name] = check_hook(
                hook, f"{self.path()}.hooks[{name!r}]"
            )
            self._savable[f"hooks/{name}"] = hook
        self._run_state = RunState(self._savable)
        self._hooks = Hooks({})
        self._loop: TrainingLoop | None = None

    @property
    def hooks(self) -> Hooks:
        """The hooks of the run; none outside of one."""
        return self._hooks

    @nowrap
    def settle(self) -> bool:
        return self._loop is None or self._loop.settle()

    @overload
    def run(
        self,
        prng_key: Tensor | None = None,
        *,
        return_evaler_summaries: Literal[True] | set[str],
        listener: Hook | Sequence[Hook] | None = None,
        progress: bool | display.Display = True,
        recipe: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> dict[str, Any]: ...

    @overload
    def run(
        self,
        prng_key: Tensor | None = None,
        *,
        return_evaler_summaries: bool | set[str] | None = None,
        listener: Hook | Sequence[Hook] | None = None,
        progress: bool | display.Display = True,
        recipe: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> dict[str, Any] | None: ...

    @nowrap
    @tracing.entry_point
    def run(
        self,
        prng_key: Tensor | None = None,
        *,
        return_evaler_summaries: bool | set[str] | None = None,
        listener: Hook | Sequence[Hook] | None = None,
        progress: bool | display.Display = True,
        recipe: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> dict[str, Any] | None:
        """Trains until `max_step`, the end of the data, or a signal to stop.

        A run continues from the checkpoint in its directory, if any, and leaves a `report.html`.

        Args:
            prng_key: key of a new run, instead of that of `seed`.
            return_evaler_summaries: names of evalers to run at the end, or True for all.
            listener: a hook, or several, for this run only; before those of the config.
            progress: whether the first process shows the progress on the standard error: drawn in
                place on a terminal and in a notebook, as lines elsewhere. Or the display to use.
            recipe: what made the config, for `run.json`; see `weft.recipes.recipe.Recipe.record`.
            resume: whether to continue a run that had another config, code or data.

        Returns:
            A dict of the "loss" and "aux" of the last step, or None without a step. With
            `return_evaler_summaries`, also the summaries of these evalers by name, as
            "evaler_summaries"; then without a step "loss" and "aux" are None. If a signal stopped
            the run, this result is None, which its type leaves out.

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
            HookError: if an object in `listener` is not a hook.
        """
        returned_evalers = names_to_return(
            self._evalers, return_evaler_summaries, self.path()
        )
        listeners = as_hooks(listener, f"{self.path()}.run: listener")
        with self.mesh():
            state_lib.check_batches(self.input, self._batch_partition())
        with contextlib.ExitStack() as stack:
            self._run_lock = stack.enter_context(run_lock(self.config.dir))
            self._fetch_copy()
            started_before = run_dir.claim_run_dir(
                self.config, recipe, layout=self._layout(), resume=resume
            )
            run = self._open_run(stack, prng_key, listeners, progress, recipe)
            resumed_from = self._begin(run.first_key, started_before)
            self.hooks.on_start(self, resumed_from)
            stopped = run.loop.run()
            is_by_signal = (
                stopped is not None and stopped.request.kind == "signal"
            )
            if self._step or is_by_signal:
                run.checkpoints.save_last()
            reason = MAX_STEP
            if stopped is not None:
                if stopped.error is not None:
                    raise stopped.error
                reason = stopped.request.text
            if has_ended(reason):
                run.evaluations.run_at_end(returned_evalers or ())
            self.hooks.on_end(self._step, reason)
            return run.result(reason, returned_evalers)

    def _fetch_copy(self) -> None:
        """Fetches a newer checkpoint, and the run's record, from where copies are kept."""
        lengths = run_dir.length_comments(self.config)
        step = self.checkpointer.fetch_copy()
        if step is None or run_dir.length_comments(self.config) == lengths:
            return
        raise RunDirError(
            f"the checkpoint of step {step} was fetched to dir={self.config.dir!r}, and its run "
            "began with another max_step, which its schedules keep. Start again: their length is "
            "read from the record that was fetched with it."
        )

    def _open_run(
        self,
        stack: contextlib.ExitStack,
        prng_key: Tensor | None,
        listeners: Sequence[Hook],
        progress: bool | display.Display,
        recipe: Mapping[str, Any] | None,
    ) -> "_Run":
        """Opens what lives as long as the run: its hooks, supervision and data."""
        cfg = self.config
        display_hooks = stack.enter_context(
            recorder.reported(cfg.dir, progress)
        )
        writers = [self.summary_writer]
        writers += [evaler.summary_writer for evaler in self._evalers.values()]
        stack.enter_context(closing_writers(writers))
        stop, status_hooks = stack.enter_context(run_context(cfg))
        evaluations = EvaluationHook(self, self._evalers)
        # A display shows failures, too.
        has_display = bool(progress) and jax.process_index() == 0
        checkpoints = CheckpointHook(
            self, self.checkpointer, logs_failures=not has_display
        )
        hooks = self._hooks_of_run(
            display_hooks + status_hooks, listeners, evaluations, checkpoints
        )
        stack.enter_context(self._with_hooks(hooks, listeners))
        agreement.check_processes_agree(
            stop, cfg, lock=self._run_lock, recipe=recipe, prng_key=prng_key
        )
        if cfg.context_manager is not None:
            stack.enter_context(config.maybe_instantiate(cfg.context_manager)())
        stack.enter_context(self.mesh())
        stack.enter_context(compilation_cache(cfg.compilation_cache_dir))
        self._batches = stack.enter_context(self._open_batches())
        stack.push(self._close)

        first_key = prng_key
        if first_key is None:
            first_key = jax.random.key(cfg.seed)
        judge = judge_of(self, first_key, cfg.log_every_n_steps)
        between_steps = contextlib.nullcontext
        if self._throughput is not None:
            # Evaluations and saves are not training time.
            between_steps = self._throughput.paused
        restore = functools.partial(self._restore_or_init, first_key)
        self._loop = TrainingLoop(
            self, hooks, judge, self._batches, between_steps, stop, restore
        )
        return _Run(self._loop, evaluations, checkpoints, first_key)

    def _hooks_of_run(
        self,
        display_hooks: Sequence[Hook],
        listeners: Sequence[Hook],
        evaluations: EvaluationHook,
        checkpoints: CheckpointHook,
    ) -> Hooks:
        """Returns the hooks of a run, in the order in which each event reaches them."""
        hooks: dict[str, Hook] = {}
        if self.config.start_trace_steps:
            hooks["traces"] = self._traces
        if self._throughput is not None:
            hooks["throughput"] = self._throughput
        for hook in display_hooks:
            hooks[type(hook).__qualname__] = hook
        for index, hook in enumerate(listeners):
            hooks[f"{type(hook).__qualname__}, listener {index}"] = hook
        for name, hook in self._configured_hooks.items():
            hooks[f"{self.path()}.hooks[{name!r}]"] = hook
        if self._early_stopping is not None:
            hooks["early_stopping"] = self._early_stopping
        # After the hooks that add summaries.
        hooks["summaries"] = SummaryHook(
            self.summary_writer, self.config.log_every_n_steps
        )
        if self._evalers:
            hooks["evaluations"] = evaluations
        # After the evaluations, whose results decide about saving.
        hooks["checkpoints"] = checkpoints
        return Hooks(hooks)

    @contextlib.contextmanager
    def _with_hooks(
        self, hooks: Hooks, listeners: Sequence[Hook]
    ) -> Iterator[None]:
        """Calls hooks while open; ends quietly if the run is stopped outside of its steps."""
        self._hooks = hooks
        savable = dict(self._savable)
        for index, hook in enumerate(listeners):
            savable[f"listeners/{index}"] = hook
        self._run_state = RunState(savable)
        try:
            yield
        except preemption.StopRun as stopped:
            # There is nothing to save, or it is saved.
            if stopped.error is not None:
                raise stopped.error from None
            hooks.on_end(self._step, stopped.request.text)
        finally:
            hooks.close()

    def _begin(self, first_key: Tensor, started_before: bool) -> int | None:
        """Restores or creates the state; returns the step of the restored checkpoint, if any."""
        note = mesh_lib.unused_gpu_note()
        if note is not None:
            logger.warning(note)
        if isinstance(self._checkpointer, Checkpointer):
            number = 0
            if jax.process_index() == 0:
                number = run_dir.number_of_run(self.config.dir)
            self._checkpointer.use_local(number)
        resumed_from = self._restore_or_init(
            first_key, started_before=started_before
        )
        self.summary_writer.log_config(self.config, step=self._step)
        if jax.process_index() == 0:
            state_texts.write(self.config.dir, self._state_specs, self.model)
            run_dir.update_record(
                self.config.dir, batch=batch_record(self.model, self.input)
            )
        return resumed_from

    def _restore_or_init(
        self, first_key: Tensor, *, started_before: bool = True
    ) -> int | None:
        """Returns the step of the restored checkpoint, if any; drops summaries of later steps."""
        resumed_from = self.restore_checkpoint()
        if resumed_from is None:
            self.init(first_key)
        if started_before:
            checkpoints = os.path.join(self.config.dir, run_dir.CHECKPOINTS_DIR)
            for module in (self, *self._evalers.values()):
                module.summary_writer.log_checkpoint(
                    checkpoints,
                    state=self._state,
                    action=CheckpointerAction.RESTORE,
                    step=self._step,
                )
        return resumed_from

    def _close(
        self,
        error_type: type[BaseException] | None,
        error: object,
        traceback: object,
    ) -> None:
        del error, traceback
        self._loop = None
        self.checkpointer.stop(has_exception=error_type is not None)
        self._batches = None


class _Run(NamedTuple):
    """Parts of one run, besides its trainer."""

    loop: TrainingLoop
    evaluations: EvaluationHook
    checkpoints: CheckpointHook
    first_key: Tensor

    def result(
        self, reason: str, evalers: Sequence[str] | None
    ) -> dict[str, Any] | None:
        """Returns what the trainer's `run` returns: see there."""
        result: dict[str, Any] | None = None
        if self.loop.last_step is not None:
            outputs = self.loop.last_step.outputs
            result = {"loss": outputs["loss"], "aux": outputs["aux"]}
        if evalers is None:
            return result
        if not has_ended(reason):
            return None
        if result is None:
            result = {"loss": None, "aux": None}
        summaries = self.evaluations.summaries
        result["evaler_summaries"] = {name: summaries[name] for name in evalers}
        return result


@contextlib.contextmanager
def run_context(
    cfg: SpmdTrainer.Config,
) -> Iterator[tuple[preemption.GracefulStop, list[Hook]]]:
    """Supervises a run while open.

    Yields the object that decides when to stop, and the hook of the status page, if there is one.
    """
    with (
        Watchdog(
            cfg.watchdog_timeout_seconds, cfg.crash_on_hang_timeout_seconds
        ) as watchdog,
        live.status_page(cfg.status_port, watchdog) as status,
        preemption.graceful_stop(
            watchdog.report, cfg.readiness_timeout_seconds
        ) as stop,
    ):
        watchdog.waits_for_others = lambda: stop.waits_for_others
        # Wait for all processes before the first collective, which would block without a message.
        # A request to stop is handled before the first step.
        stop.agreed(
            "preparing the state",
            within_seconds=cfg.readiness_timeout_seconds,
            starts_run=True,
        )
        status_hooks: list[Hook] = []
        if status is not None:
            status_hooks.append(status)
        yield stop, status_hooks
