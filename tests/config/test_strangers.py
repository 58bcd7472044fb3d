"""Texts of configs that were written to do harm: none does, whatever command reads it."""

import contextlib
import os
import sys

import numpy as np
import pytest

from weft.cli import main
from weft.config import from_text, to_text
from weft.errors import WeftError
from weft.recipes.lm import lm_tiny

MAP = "weft.traverse_util.path_aware_map"
EVAL = "weft.jax_utils.partial_eval_by_shape"


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def planted(tmp_path):
    """Files that act when they are read: a pickle, a module. And the path where one sees it."""
    there = tmp_path / "it-ran"
    np.save(tmp_path / "evil.npy", np.array([Payload(there)], object), allow_pickle=True)
    (tmp_path / "evil_module.py").write_text(f"open({str(there)!r}, 'w')")
    return {"evil": str(tmp_path / "evil.npy"), "path": str(there), "folder": str(tmp_path)}


# What a text could name once. CALL(target)(…) is a config; SAVE writes a file when it is called.
SHORT = {
    "CALL": "config_for_function",
    "EVAL": EVAL,
    "MAP": MAP,
    "SAVE": "functools.partial(numpy.savetxt, 'PATH', [1.0])",
    "WRITER": "weft.trainer.summary_writer.SummaryWriter",
}
CONFIGS = {
    "unpickles": "CALL(MAP)(f=functools.partial(EVAL, numpy.load, [], 'EVIL', None, True), "
    "nested_dict={'a': 'ASCII'})",
    "writes": "CALL(MAP)(f=functools.partial(EVAL, numpy.savetxt, [], 'PATH', [1.0]), "
    "nested_dict={'a': 'x'})",
    "evaluates": "CALL(EVAL)(fn=numpy.savetxt, input_spec=[], args=('PATH', [1.0]))",
    "saves": "CALL(EVAL)(fn=numpy.save, input_spec=[], args=('PATH', [1.0]))",
    "opens": "CALL(EVAL)(fn=numpy.memmap, input_spec=[], args=('PATH', 'uint8', 'w+', 0, [8]))",
    "calls back": "CALL(EVAL)(fn=jax.debug.callback, input_spec=[], args=(SAVE,))",
    "pure callback": "CALL(jax.pure_callback)(callback=SAVE, result_shape_dtypes=[], args=())",
    "maps a tree": "CALL(jax.tree.map)(f=SAVE, tree=[[1.0]])",
    "injects": "CALL(optax.inject_hyperparams)(inner_factory=SAVE)",
    "masks": "CALL(optax.masked)(inner=CALL(optax.sgd)(learning_rate=1.0), mask=SAVE)",
    "schedules": "CALL(optax.sgd)(learning_rate=SAVE)",
    "joins": "CALL(optax.join_schedules)(schedules=[SAVE], boundaries=[])",
    "applies along": "CALL(numpy.apply_along_axis)(func1d=SAVE, axis=0, arr=[1.0])",
    "applies over": "CALL(weft.jax_utils.scan_in_dim)(body_fn=SAVE, init=[1.0], xs=[1.0])",
    "loads": "CALL(jax.numpy.load)(file='EVIL', allow_pickle=True)",
    "profiles": "CALL(jax.profiler.start_trace)(log_dir='PATH')",
    "exports": "CALL(jax.export.deserialize)(blob=b'')",
    "imports": "CALL(weft.config.get_named_trainer_config)(config_name='x', "
    "config_module='evil_module')",
    "imports a class": "evil_module.Layer.Config()",
    "names a module": "CALL(EVAL)(fn=evil_module.f, input_spec=[])",
    "reads a text": "CALL(weft.config.from_text)(text='evil_module.f', allow=['evil_module'])",
    "allows itself": "CALL(weft.config.resolve_reference)(name='evil_module.f', "
    "allow=['evil_module'])",
    "overrides": "CALL(weft.config.apply_overrides)(cfg=None, overrides=['a=evil_module.f'], "
    "allow=['evil_module'])",
    "modifies": "config_for_class(weft.launch.local.LocalJob)(config=None)",
    "starts": "weft.launch.local.LocalJob.Config(name='x', command=['touch', 'PATH'], "
    "num_processes=1)",
    "connects": "weft.trainer.wandb_writer.WandBWriter.Config(dir='PATH')",
    "calls config": "config_for_class(WRITER.Config)(klass=WRITER, dir='PATH')",
    "binds a config": "functools.partial(WRITER.Config, dir='PATH')",
    "classes": "config_for_class(numpy.memmap)(filename='PATH', mode='w+', shape=[8])",
    "through a module": "CALL(weft.trainer.run_record.os.makedirs)(name='PATH')",
    "through an alias": "CALL(weft.trainer.run_record.write_whole)(path='PATH', text='x')",
    "record": "weft.hierarchy.base_layer.RematSpec(policy=SAVE)",
    "reduces": "CALL(functools.reduce)(function=numpy.savetxt, iterable=['PATH', [1.0]])",
    "getitem": "CALL(weft.trainer.trainer.SpmdTrainer.__class_getitem__)(x=1)",
    "formats": "CALL(str.format)(args=('{0.__class__}',))",
}


def text_of(kind, planted):
    """The text of an attack on files that lie there."""
    text = CONFIGS[kind]
    for name, meaning in SHORT.items():
        text = text.replace(name, meaning)
    return text.replace("PATH", planted["path"]).replace("EVIL", planted["evil"])


def make(text):
    """Does with a config what a program would: reads it, makes the object and calls it."""
    with contextlib.suppress(WeftError):
        cfg = from_text(text)
        try:
            made = cfg.instantiate()
            made(1.0) if callable(made) else None
        except Exception as error:
            return error
    return None


def ran(planted):
    return os.path.exists(planted["path"]) or "evil_module" in sys.modules


@pytest.mark.parametrize("kind", CONFIGS)
def test_no_text_does_harm(kind, planted, monkeypatch):
    monkeypatch.syspath_prepend(planted["folder"])
    text = text_of(kind, planted)
    if not text.startswith("config_for") and ".Config(" not in text:
        text = f"weft.trainer.trainer.SpmdTrainer.Config(context_manager={text})"
    make(text)
    assert not ran(planted)
    with pytest.raises(WeftError):
        from_text(text)


COMMANDS = [
    ["tabulate", "run"],
    ["sample", "run"],
    ["export", "run", "--to", "out.safetensors"],
    ["check", "run"],
    ["train", "run"],
    ["train", "run/config.txt", "dir=elsewhere"],
    ["lr-find", "run"],
    ["launch", "local", "-n", "1", "run"],
    ["config", "show", "run"],
    ["config", "diff", "run", "lm-tiny"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("kind", ["unpickles", "writes"])
def test_no_command_runs_what_the_config_of_a_run_says(
    kind, command, planted, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    cfg = lm_tiny().set(max_step=1)
    attack = text_of(kind, planted)
    held = "context_manager=None"
    text = to_text(cfg)
    assert held in text and "corpus=" in text
    text = text.replace(held, f"context_manager={attack}")
    (tmp_path / "run" / "config.txt").write_text(text)
    code = main(command)
    assert not ran(planted)
    assert code == 2
    error = capsys.readouterr().err
    assert f"context_manager: a text may not name '{MAP}' as what it configures" in error
    assert "config.txt:" in error
    assert sorted(os.listdir(tmp_path)) == ["evil.npy", "evil_module.py", "run"]


TRAINER = "weft.trainer.trainer.SpmdTrainer"
WRITER = "weft.trainer.summary_writer.SummaryWriter"


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        (TRAINER, "compilation_cache_dir", "'/programs'"),
        (TRAINER, "status_port", "8080"),
        (WRITER, "dir", "'/home'"),
        ("weft.trainer.checkpointer.Checkpointer", "dir", "'/home'"),
    ],
)
def test_a_text_does_not_decide_what_acts_outside_of_the_run(cls, field, value, caplog):
    text = f"{cls}.Config({field}={value})"
    cfg = from_text(text)
    assert getattr(cfg, field) == getattr(type(cfg)(klass=cfg.klass), field)
    assert f"text:1: {field}={value} is not taken from a text, as it acts outside" in caplog.text
    assert f"set it yourself: {field}=… on the command line" in caplog.text
    assert repr(getattr(from_text(text, allow=(cls,)), field)) == value
    caplog.clear()
    from_text(f"{cls}.Config({field}={to_text(getattr(cfg, field))})")
    assert not caplog.text


def test_a_file_does_not_decide_where_a_run_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cfg.txt").write_text(to_text(lm_tiny().set(dir=str(tmp_path / "victim"))))
    assert main(["train", "cfg.txt", "max_step=1"]) == 2
    assert "add dir=PATH to the command line" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["cfg.txt"]


def test_the_command_line_allows_what_is_the_users(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_schedules.py").write_text("def half(step=0):\n    return 0.5\n")
    text = to_text(lm_tiny())
    assert "context_manager=None" in text
    own = "context_manager=config_for_function(own_schedules.half)(step=1)"
    (tmp_path / "cfg.txt").write_text(text.replace("context_manager=None", own))
    show = ["config", "show", str(tmp_path / "cfg.txt")]
    assert main(show) == 2
    assert "--allow own_schedules.half" in capsys.readouterr().err
    assert main([*show, "--allow", "own_schedules"]) == 0
    assert "config_for_function(own_schedules.half)(" in capsys.readouterr().out
    monkeypatch.delitem(sys.modules, "own_schedules")
