"""Texts of configs that were written to do harm: none does, whatever command reads it."""

import contextlib
import os
import sys

import jax
import numpy as np
import pytest

import weft.linen as nn
from weft.cli import main
from weft.config import REQUIRED, Required, config_class, from_text, to_text
from weft.config.configurable import needs_allow
from weft.config.text_parser import read_value
from weft.errors import ConfigError, LayerMethodError, UnknownLayerError, WeftError
from weft.hierarchy.base_layer import BaseLayer, RedirectToSharedModule
from weft.hierarchy.layers.linear import Linear
from weft.hierarchy.module import functional, get_public_method
from weft.interop.hierarchy import InHierarchy
from weft.launch.job import Job
from weft.recipes.lm import lm_tiny
from weft.trainer.summary_writer.base import BaseWriter

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
    (tmp_path / "evil_module.py").write_text(f"open({str(there)!r}, 'w')", encoding="utf-8")
    return {"evil": str(tmp_path / "evil.npy"), "path": str(there), "folder": str(tmp_path)}


# Names allowed in the past. CALL(target)(…) is a config; SAVE writes a file when called.
SHORT = {
    "CALL": "config_for_function",
    "EVAL": EVAL,
    "MAP": MAP,
    "SAVE": "functools.partial(numpy.savetxt, 'PATH', [1.0])",
    "WRITER": "weft.trainer.summary_writer.files.SummaryWriter",
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
    "connects": "weft.trainer.summary_writer.trackers.WandBWriter.Config(dir='PATH')",
    "calls config": "config_for_class(WRITER.Config)(klass=WRITER, dir='PATH')",
    "binds a config": "functools.partial(WRITER.Config, dir='PATH')",
    "classes": "config_for_class(numpy.memmap)(filename='PATH', mode='w+', shape=[8])",
    "through a module": "CALL(weft.trainer.run_dir.os.makedirs)(name='PATH')",
    "through an alias": "CALL(weft.trainer.run_dir.update_record)(directory='PATH', x=1)",
    "record": "weft.hierarchy.base_layer.RematSpec(policy=SAVE)",
    "reduces": "CALL(functools.reduce)(function=numpy.savetxt, iterable=['PATH', [1.0]])",
    "getitem": "CALL(weft.trainer.trainer.SpmdTrainer.__class_getitem__)(x=1)",
    "formats": "CALL(str.format)(args=('{0.__class__}',))",
}


def text_of(kind, planted):
    """Returns the text of an attack on files that lie there."""
    text = CONFIGS[kind]
    for name, meaning in SHORT.items():
        text = text.replace(name, meaning)
    return text.replace("PATH", planted["path"]).replace("EVIL", planted["evil"])


def make(text, **options):
    """Does with a config what a program would: reads it, makes the object and calls it."""
    with contextlib.suppress(WeftError):
        cfg = from_text(text, **options)
        try:
            made = cfg.instantiate()
            made(1.0) if callable(made) else None
        except Exception as error:
            return error
    return None


def ran(planted):
    return os.path.exists(planted["path"]) or "evil_module" in sys.modules


@pytest.mark.parametrize("kind", CONFIGS)
def test_untrusted_texts_are_harmless(kind, planted, monkeypatch):
    monkeypatch.syspath_prepend(planted["folder"])
    text = text_of(kind, planted)
    if not text.startswith("config_for") and ".Config(" not in text:
        text = f"weft.trainer.trainer.SpmdTrainer.Config(context_manager={text})"
    make(text)
    assert not ran(planted)
    with pytest.raises(WeftError):
        from_text(text)
    # With what cannot be read kept as it is, as for commands that only look at a config.
    make(text, keep_unreadable=True)
    with contextlib.suppress(WeftError):
        shown = to_text(from_text(text, keep_unreadable=True))
        make(shown, keep_unreadable=True)
    assert not ran(planted)


# These make what they need only, which the attack is not part of.
LOOKING = [
    ["tabulate", "run"],
    ["sample", "run"],
    ["export", "run", "--to", "out.safetensors"],
    ["config", "show", "run"],
    ["config", "diff", "run", "lm-tiny"],
]
COMMANDS = [
    ["check", "run"],
    ["train", "run"],
    ["train", "run/config.txt", "dir=elsewhere"],
    ["lr-find", "run"],
    ["launch", "local", "-n", "1", "run"],
    *LOOKING,
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("kind", ["unpickles", "writes"])
def test_commands_do_not_execute_run_config(kind, command, planted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    cfg = lm_tiny().set(max_step=1)
    attack = text_of(kind, planted)
    held = "context_manager=None"
    text = to_text(cfg)
    assert held in text and "corpus=" in text
    text = text.replace(held, f"context_manager={attack}")
    (tmp_path / "run" / "config.txt").write_text(text, encoding="utf-8")
    code = main(command)
    assert not ran(planted)
    assert sorted(os.listdir(tmp_path)) == ["evil.npy", "evil_module.py", "run"]
    if command in LOOKING:
        return
    assert code == 2
    error = capsys.readouterr().err
    assert f"context_manager: a text may not name '{MAP}' as a target of a config" in error
    assert "config.txt:" in error


TRAINER = "weft.trainer.trainer.SpmdTrainer"
WRITER = "weft.trainer.summary_writer.files.SummaryWriter"


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        (TRAINER, "compilation_cache_dir", "'/programs'"),
        (TRAINER, "status_port", "8080"),
        (WRITER, "dir", "'/home'"),
        ("weft.trainer.checkpointer.checkpointer.Checkpointer", "dir", "'/home'"),
        ("weft.trainer.checkpointer.checkpointer.Checkpointer", "copy_to", "'s3://bucket/run'"),
    ],
)
def test_text_cannot_set_outside_effects(cls, field, value, caplog):
    text = f"{cls}.Config({field}={value})"
    cfg = from_text(text)
    assert getattr(cfg, field) == getattr(type(cfg)(klass=cfg.klass), field)
    assert f"text:1: {field}={value} is ignored in a text, because it has effects" in caplog.text
    assert f"To set it, pass {field}=… on the command line" in caplog.text
    assert repr(getattr(from_text(text, allow=(cls,)), field)) == value
    caplog.clear()
    from_text(f"{cls}.Config({field}={to_text(getattr(cfg, field))})")
    assert not caplog.text


def test_dir_in_config_file_is_rejected(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cfg.txt").write_text(
        to_text(lm_tiny().set(dir=str(tmp_path / "victim"))), encoding="utf-8"
    )
    assert main(["train", "cfg.txt", "max_step=1"]) == 2
    assert "add dir=PATH to the command line" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["cfg.txt"]


def test_command_line_sets_protected_fields(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_schedules.py").write_text(
        "def half(step=0):\n    return 0.5\n", encoding="utf-8"
    )
    text = to_text(lm_tiny())
    assert "context_manager=None" in text
    own = "context_manager=config_for_function(own_schedules.half)(step=1)"
    (tmp_path / "cfg.txt").write_text(text.replace("context_manager=None", own), encoding="utf-8")
    path = str(tmp_path / "cfg.txt")
    assert main(["check", path]) == 2
    assert "--allow own_schedules.half" in capsys.readouterr().err
    assert main(["config", "show", path, "--allow", "own_schedules"]) == 0
    assert "config_for_function(own_schedules.half)(" in capsys.readouterr().out
    monkeypatch.delitem(sys.modules, "own_schedules")


STORAGE = "weft.trainer.state_builder.TensorStoreStateStorageBuilder"
IN_HIERARCHY = "weft.interop.hierarchy.InHierarchy"
CHECKPOINTER = "weft.trainer.checkpointer.checkpointer.Checkpointer"
JSON_LINES = "weft.trainer.summary_writer.files.JsonLinesWriter"
COMPOSITE = "weft.trainer.summary_writer.base.CompositeWriter"


@pytest.mark.parametrize(
    "text",
    [
        # A class that has the field, and the class that acts on it, in either order.
        f"{TRAINER}.Config(dir='/victim', klass={WRITER})",
        f"{TRAINER}.Config(klass={WRITER}, dir='/victim')",
        f"{STORAGE}.Config(dir='/victim', klass={JSON_LINES})",
        f"{STORAGE}.Config(dir='/victim', klass={CHECKPOINTER})",
        f"weft.trainer.summary_writer.base.BaseWriter.Config(dir='/victim', klass={JSON_LINES})",
        f"weft.trainer.summary_writer.base.NoOpWriter.Config(dir='/victim', klass={WRITER})",
        f"{COMPOSITE}.Config(dir='/victim', writers={{'a': {JSON_LINES}.Config()}})",
        f"weft.cli.lr_find.NoCheckpoints.Config(dir='/victim', klass={CHECKPOINTER})",
    ],
)
def test_needs_allow_follows_the_instantiated_class(text, caplog):
    assert from_text(text).dir != "/victim"
    assert "dir='/victim' is ignored in a text" in caplog.text


def test_subclass_inherits_needs_allow():
    class Sub(BaseWriter):
        _needs_allow = ("other",)

    class Jobs(Job):
        _needs_allow = ()

    assert needs_allow(Sub) == {"dir", "other"}
    assert needs_allow(Jobs) is True
    assert needs_allow(int) == frozenset()


@pytest.mark.parametrize(
    "layer",
    [
        f"layer={WRITER}, kwargs={{'dir': '/victim', 'name': 'x'}}",
        f"layer={WRITER}.Config(name='x'), kwargs={{'dir': '/victim'}}",
        f"layer={CHECKPOINTER}, kwargs={{'dir': '/victim', 'name': 'x'}}",
        f"layer={TRAINER}, kwargs={{'status_port': 8080, 'name': 'x'}}",
        f"layer={TRAINER}.Config(dir='/victim', name='x')",
        f"layer={STORAGE}.Config(dir='/victim', name='x'), kwargs={{'klass': {WRITER}}}",
    ],
)
@pytest.mark.parametrize("holder", [IN_HIERARCHY, "weft.trainer.model.LibraryModel"])
def test_outside_effects_are_not_layers(holder, layer):
    cfg = from_text(f"{holder}.Config({layer}, inputs=(), name='x')")
    with pytest.raises(UnknownLayerError, match=r"is not a layer|is not a class"):
        cfg.instantiate(parent=None)


MODIFIERS = "weft.trainer.trainer_config_modifier"
SPECS = f"{MODIFIERS}.PartitionSpecModifier.Config(partition_specs="
MODIFIED = {
    "dir": SPECS + "{'': {'dir': 'victim'}})",
    "compilation_cache_dir": SPECS + "{'': {'compilation_cache_dir': 'victim'}})",
    "status_port": SPECS + "{'': {'status_port': 8080}})",
    "a writer's dir": SPECS + "{'summary_writer': {'dir': 'victim'}})",
    "klass": SPECS + f"{{'model': {{'klass': {WRITER}}}}})",
    "what is carried over": f"{MODIFIERS}.ReplaceLayerConfigModifier.Config("
    f"target_cls={STORAGE}, source_config={WRITER}.Config())",
    "in a chain": f"{MODIFIERS}.ChainConfigModifier.Config(config_modifiers=["
    + SPECS
    + "{'': {'dir': 'victim'}})])",
}


@pytest.mark.parametrize(
    ("kind", "command"),
    [*((kind, "tabulate") for kind in MODIFIED), ("dir", "train"), ("klass", "check")],
)
def test_modifier_in_text_only_sets_layouts(kind, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    text = to_text(lm_tiny().set(max_step=1))
    for before, after in (
        ("config_modifiers=[]", f"config_modifiers=[{MODIFIED[kind]}]"),
        ("init_state_builder=None", f"init_state_builder={STORAGE}.Config(dir='victim')"),
    ):
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "run" / "config.txt").write_text(text, encoding="utf-8")
    assert main([command, "run"]) == 2
    error = capsys.readouterr().err
    expected = "to copy dir from" if kind.startswith("what") else "layouts and recomputation of"
    assert expected in error
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    "text",
    [
        "functools.partial(functools.partial, weft.linen.linear.Dense)",
        f"functools.partial({WRITER}.Config, dir='/victim')",
        f"functools.partial({WRITER}.Config.set, dir='/victim')",
        f"config_for_function({TRAINER}.default_config)()",
        f"config_for_function({WRITER}.Config.instantiate)()",
        f"config_for_class({STORAGE})()",
        f"{WRITER}.Config.Config(dir='/victim')",
        f"{WRITER}.__mro__",
        f"{WRITER}.__init__",
        f"{TRAINER}.Config(name={TRAINER}.default_config)",
        f"{{{WRITER}.Config(): 1}}",
        "weft.config.Configurable.Config(klass=b'os')",
        "weft.config.Configurable.Config(klass=(lambda: 1))",
        "weft.config.Configurable.Config(klass=weft.launch.local.LocalJob)",
        "weft.trainer.summary_writer.base.BaseWriter.Config(klass=weft.trainer.summary_writer.trackers.WandBWriter)",
        "weft.config.configurable.Generic",
        "weft.trainer.trainer.os.system",
        "weft.linen.module.CurrentModule",
        "weft.linen.layers.Sequential(layers=[weft.input.datasets.text_dataset])",
        "config_for_function(weft.input.datasets.tfds_dataset)(name='x', split='a', download=True)",
        "numpy.dtype([('a', 'O')])",
        "config_for_function(jax.numpy.float32)(*[1])",
        "config_for_function(jax.numpy.ones)(**{'shape': 1})",
        "weft.trainer.mesh.HybridMeshShape(klass=1)",
        "config_for_function(weft.config.maybe_instantiate)(x=1)",
        "[x for x in (1,)]",
        "f'{1}'",
    ],
)
def test_no_other_path_to_outside_effects(text):
    with pytest.raises(ConfigError):
        read_value(text)


@pytest.mark.parametrize(
    "method", ["__init__", "_add_child", "config", "children", "default_config", "Config", "emb"]
)
def test_only_public_config_methods_are_called(method):
    layer = Linear.default_config().set(name="x", input_dim=2, output_dim=2)
    assert get_public_method(layer.instantiate(parent=None), method) is None


@pytest.mark.parametrize(
    "methods", [{"_parent": "forward"}, {"initialize_parameters_recursively": "forward"}]
)
def test_redirecting_layer_keeps_its_methods(methods):
    cfg = RedirectToSharedModule.default_config().set(name="x", shared_module="shared")
    with pytest.raises(LayerMethodError, match=r"expected 'forward' or a new public name"):
        cfg.set(method_map=methods).instantiate(parent=None)


class Redirecting(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        target: Required[str] = REQUIRED

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("inner", Linear.default_config().set(input_dim=2, output_dim=2))
        redirect = RedirectToSharedModule.default_config().set(shared_module="shared")
        self._add_child("other", redirect.set(method_map={"forward": cfg.target}))
        self._share_with_descendants(self.inner, shared_module_name="shared")

    def forward(self, x):
        return self.other(x)


def test_redirecting_layer_calls_public_methods_only():
    def run(target):
        cfg = Redirecting.default_config().set(name="x", target=target)
        layer = cfg.instantiate(parent=None)
        state = layer.initialize_parameters_recursively(jax.random.key(0))
        x = jax.numpy.ones((1, 2))
        return functional(layer, prng_key=None, state=state, inputs=(x,), is_training=False)[0]

    assert run("forward").shape == (1, 2)
    with pytest.raises(LayerMethodError, match="Linear has no public method of that name"):
        run("_share_with_descendants")


def test_only_public_library_methods_are_called():
    text = f"{IN_HIERARCHY}.Config(layer=weft.linen.linear.Dense.Config, inputs=(), name='x')"
    with pytest.raises(ConfigError):
        from_text(text)
    cfg = InHierarchy.default_config().set(name="x", layer=nn.Dense(2))
    layer = cfg.set(inputs=(jax.numpy.ones((1, 2)),)).instantiate(parent=None)
    state = layer.initialize_parameters_recursively(jax.random.key(0))
    inputs = {"inputs": jax.numpy.ones((1, 2))}
    functional(layer, prng_key=None, state=state, inputs=inputs, is_training=False)
    inputs["method"] = "__setattr__"
    with pytest.raises(LayerMethodError, match="'__setattr__' of a Dense; name one of its public"):
        functional(layer, prng_key=None, state=state, inputs=inputs, is_training=False)
