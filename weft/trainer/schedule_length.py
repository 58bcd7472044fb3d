"""Length of a run's schedules: its `max_step`, unless the config sets another one.

    learning_rate=config_for_function(cosine_with_linear_warmup).set(peak_lr=0.1)

A required argument `max_step` of a schedule anywhere in the learner's config may stay unset. The
trainer then sets it to its own `max_step`. A run that continues with another `max_step` keeps the
curve with which it began: the steps that it has trained belong to that curve.
"""

import math
import os
from typing import Any

import jax

from weft.config import REQUIRED, ConfigBase
from weft.errors import ScheduleError
from weft.trainer.checkpointer.dirs import step_dirs
from weft.trainer.run_dir import CHECKPOINTS_DIR, find_fields, read_record, update_record
from weft.trainer.schedule import as_schedule_fn
from weft.trainer.trainer_config_modifier import outermost

_RECORD = "schedule_steps"
_LENGTH, _RATE = "max_step", "learning_rate"


def learner_config(cfg: ConfigBase) -> Any:
    """Returns the learner of a trainer's config, with the length of all its schedules set.

    Raises ScheduleError if neither a schedule nor the trainer has a length.
    """
    unset = _unset(cfg)
    if not unset:
        return cfg.learner
    steps = schedule_steps(cfg)
    if math.isinf(steps):
        raise ScheduleError(
            f"learner.{unset[0]} is the number of steps of a schedule, and neither it nor the "
            "trainer's max_step is set. Set max_step=1000, or the schedule's."
        )
    learner: Any = cfg.learner.clone()
    for path in unset:
        learner.set_recursively(path, value=steps)
    return learner


def schedule_steps(cfg: ConfigBase) -> Any:
    """Returns the length of the schedules of a run that set none: `max_step` at its first start."""
    if step_dirs(os.path.join(cfg.dir, CHECKPOINTS_DIR)):
        return read_record(cfg.dir).get(_RECORD, cfg.max_step)
    return cfg.max_step


def record_schedule_steps(cfg: ConfigBase) -> None:
    """Records the length in the directory of a run that starts, for its later starts."""
    if _unset(cfg) and jax.process_index() == 0:
        update_record(cfg.dir, **{_RECORD: schedule_steps(cfg)})


def _unset(cfg: ConfigBase) -> list[str]:
    return [path for path, x in find_fields(_LENGTH, cfg.learner).items() if x is REQUIRED]


def length_comments(cfg: ConfigBase) -> list[str]:
    """Returns comments to a config's text, with the lengths of the learner's schedules."""
    steps = schedule_steps(cfg)
    why = "max_step" if steps == cfg.max_step else "the max_step with which the run began"
    return [f"# learner.{path} is {steps}, {why}." for path in _unset(cfg)]


def schedule_notes(cfg: ConfigBase) -> list[str]:
    """Returns what a user may not expect of a run's learning rates, one sentence for each.

    That is a schedule that ends before the run, or that keeps a length other than `max_step`.
    """
    unset, learner = _unset(cfg), learner_config(cfg)
    lengths = {p: n for p, n in find_fields(_LENGTH, learner).items() if isinstance(n, int)}
    notes = []
    for path, rate in outermost(find_fields(_RATE, learner)).items():
        inside = {p: steps for p, steps in lengths.items() if p.startswith(f"{path}.")}
        if not inside or max(inside.values()) == cfg.max_step:
            continue
        field, steps = max(inside.items(), key=lambda item: item[1])
        why = "as when the run began" if field in unset else f"as learner.{field} says"
        note = f"{steps:,} steps, {why}"
        if steps < cfg.max_step and not math.isinf(cfg.max_step):
            note += f"; {_after(as_schedule_fn(rate), steps, int(cfg.max_step))}"
        notes.append(note)
    return notes


def _after(rate: Any, steps: int, last: int) -> str:
    at_end, at_last = float(rate(steps)), float(rate(last))
    if at_end != at_last:
        values = f"{at_end:.3g} at step {steps:,} and {at_last:.3g} at step {last:,}"
        return f"the learning rate is {values}"
    if at_last == 0:
        return "then the learning rate is 0, and steps train nothing: start a run in another `dir`"
    return f"then the learning rate stays {at_last:.3g}"
