"""Tests of the hooks of a run."""

import jax
import pytest

from tests.trainer.language_models import Bigrams
from weft.config import Configurable, config_for_class, config_for_function
from weft.errors import HookError
from weft.recipes.lm import lm_tiny
from weft.trainer import EndRun, Hook, has_ended
from weft.trainer.checkpointer import every_n_steps_policy
from weft.trainer.hooks import Hooks, check_hook
from weft.trainer.summary_writer import read_json_lines

EVENTS = {
    "on_start": ("trainer", 3),
    "before_step": (4,),
    "on_dispatch": (4, {}),
    "on_step": (4, {}, {}),
    "after_step": (4, {}, {}),
    "on_summaries": (4, {}, {}),
    "on_eval": ("held_out", 4, {}),
    "on_checkpoint": (4,),
    "on_save_failed": (4, "error"),
    "on_rewind": (3,),
    "on_end": (4, "max_step"),
}


def test_hooks_receive_all_events_in_order():
    received = []

    class Recorder(Hook):
        def __init__(self, name):
            self.name = name

        def __getattribute__(self, event):
            if event not in EVENTS:
                return super().__getattribute__(event)
            return lambda *values: received.append((self.name, event, values))

    hooks = Hooks({"a": Recorder("a"), "b": Recorder("b")})
    for event, values in EVENTS.items():
        getattr(hooks, event)(*values)
        assert received[-2:] == [("a", event, values), ("b", event, values)]


def test_first_request_ends_the_run_and_all_hooks_are_called():
    class Counter(Hook):
        steps = 0

        def __init__(self, reason):
            self.reason = reason

        def on_step(self, step, outputs, batch):
            self.steps += 1
            return EndRun(self.reason)

    first, second = Counter("the first"), Counter("the second")
    hooks = Hooks({"first": first, "second": second})
    assert hooks.end is None
    hooks.on_step(1, {}, {})
    assert hooks.end == EndRun("the first")
    assert hooks.end.full_reason == "a hook: the first"
    assert has_ended(hooks.end.full_reason)
    assert (first.steps, second.steps) == (1, 1)


def test_error_has_a_note_with_the_hook():
    class Broken(Hook):
        def on_step(self, step, outputs, batch):
            raise ZeroDivisionError("broken")

    hooks = Hooks({"mine": Broken()})
    with pytest.raises(ZeroDivisionError, match="broken") as caught:
        hooks.on_step(1, {}, {})
    (note,) = caught.value.__notes__
    assert note == "It was raised by `on_step` of the hook mine."


def test_all_hooks_are_closed_if_one_cannot_be():
    closed = []

    class Closing(Hook):
        def __init__(self, error=None):
            self.error = error

        def close(self):
            closed.append(self)
            if self.error:
                raise self.error

    hooks = {"a": Closing(), "b": Closing(OSError("busy")), "c": Closing()}
    with pytest.raises(OSError, match="busy"):
        Hooks(hooks).close()
    assert set(closed) == set(hooks.values())


def test_object_with_some_of_the_methods_is_a_hook():
    class Steps:
        seen = ()

        def on_step(self, step, outputs, batch):
            self.seen += (step,)

    steps = Steps()
    hooks = Hooks({"steps": check_hook(steps, "listener")})
    hooks.before_step(3)
    hooks.on_step(3, {}, {})
    hooks.on_end(3, "max_step")
    assert steps.seen == (3,)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(print, "a builtin_function_or_method"), (Hook, "the class Hook"), ("log", "a str")],
)
def test_other_objects_are_refused(value, kind):
    with pytest.raises(HookError, match=rf"^here is {kind}, which is not a hook\. Pass an"):
        check_hook(value, "here")


class Calls(Hook):
    """Records the events, adds a summary, and ends the run after some steps of all its starts."""

    def __init__(self, num_steps=10**6):
        self.events, self.count, self.num_steps = [], 0, num_steps

    def on_start(self, trainer, resumed_from):
        self.trainer = trainer
        self.events.append(("start", resumed_from))

    def before_step(self, step):
        assert self.trainer.step == step - 1
        self.events.append(("before", step))

    def on_step(self, step, outputs, batch):
        self.events.append(("step", step))

    def after_step(self, step, outputs, batch):
        assert self.trainer.step == step
        self.count += 1
        self.events.append(("after", step))
        return EndRun("enough") if self.count >= self.num_steps else None

    def on_summaries(self, step, outputs, batch):
        outputs["summaries"]["squared"] = step**2
        self.events.append(("summaries", step))

    def on_checkpoint(self, step):
        self.events.append(("saved", step))

    def on_end(self, step, reason):
        self.events.append(("end", reason))

    def close(self):
        self.events.append(("closed", None))

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]


def config(directory, **hooks):
    cfg = lm_tiny().set(dir=str(directory), model=Bigrams.default_config(), evalers={}, max_step=9)
    cfg.set(mesh_shape=(1, 1), hooks=hooks)
    cfg.checkpointer.save_policy = config_for_function(every_n_steps_policy).set(n=2)
    for writer in cfg.summary_writer.writers.values():
        writer.write_every_n_steps = 1
    return cfg


def run(cfg, **kwargs):
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    trainer.run(progress=False, **kwargs)
    return trainer


def test_users_hooks_are_called_around_steps_end_the_run_and_are_saved(tmp_path):
    listener = Calls()
    cfg = config(tmp_path, mine=config_for_class(Calls).set(num_steps=3))
    trainer = run(cfg, listener=listener)
    assert trainer.step == 3
    assert listener.events == [
        ("start", None),
        ("before", 1),
        ("step", 1),
        ("after", 1),
        ("before", 2),
        ("summaries", 1),  # while step 2 runs
        ("step", 2),
        ("after", 2),
        ("summaries", 2),  # before step 2 is saved
        ("saved", 2),
        ("before", 3),
        ("step", 3),
        ("after", 3),
        ("summaries", 3),
        ("saved", 3),
        ("end", "a hook: enough"),
        ("closed", None),
    ]
    records = read_json_lines(str(tmp_path / "summaries/train_train"))
    squares = [x["values"]["squared"] for x in records if "squared" in x.get("values", {})]
    assert squares == [1, 4, 9]

    # Its count is restored, also that of a listener.
    cfg.hooks["mine"].num_steps = 5
    again = Calls()
    assert run(cfg, listener=[again]).step == 5
    assert again.count == 5 and again.events[0] == ("start", 3)
    cfg.hooks["mine"].num_steps = 5
    assert run(cfg.set(hooks={})).step == 9  # without it, the run is not over


class Broken(Configurable, Hook):
    Config = Configurable.Config

    def on_step(self, step, outputs, batch):
        raise ZeroDivisionError("broken")


def test_error_of_a_hook_ends_the_run_and_names_it(tmp_path):
    closed = Calls()
    with pytest.raises(ZeroDivisionError, match="broken") as caught:
        run(config(tmp_path, mine=Broken.default_config()), listener=closed)
    (note,) = caught.value.__notes__
    assert note == "It was raised by `on_step` of the hook trainer.hooks['mine']."
    assert closed.events[-1] == ("closed", None)


class NoHook:
    pass


def test_other_kinds_are_refused_before_the_run(tmp_path):
    cfg = config(tmp_path, mine=config_for_class(NoHook))
    with pytest.raises(HookError, match=r"^trainer\.hooks\['mine'\] is a NoHook, which is not"):
        run(cfg)
    with pytest.raises(HookError, match=r"^trainer\.run: listener is the class Calls, which"):
        run(config(tmp_path), listener=Calls)
