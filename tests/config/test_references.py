import ast
import dataclasses
import enum
import functools
import os  # noqa: F401 - a hostile text tries to reach it through this module
import sys
import types
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import weft.config
from weft._lazy import defining_name
from weft.config import ConfigReferenceError, Configurable
from weft.config.references import (
    ENUMS,
    RECORDS,
    TARGETS,
    VALUES,
    _lookup_in_module,
    _split_reference,
    reference_to,
    resolve_reference,
)


class Colour(enum.Enum):
    RED = 1

    def shade(self):
        return self


class Layer(Configurable):
    class Part(Configurable):
        pass

    @staticmethod
    def act(x):
        return x


class Point(NamedTuple):
    x: int


def act(x):
    return x


@pytest.mark.parametrize(
    ("obj", "name"),
    [
        (int, "int"),
        (jax.nn.gelu, "jax.nn.gelu"),
        (jax.nn.relu, "jax.nn.relu"),
        (jnp.tanh, "jax.numpy.tanh"),
        (np.tanh, "numpy.tanh"),
        (jnp.float32, "jax.numpy.float32"),
        (np.float32, "numpy.float32"),
        (ml_dtypes.bfloat16, "ml_dtypes.bfloat16"),
        (jax.nn.initializers.normal, "jax.nn.initializers.normal"),
        (optax.adamw, "optax.adamw"),
        (jax.checkpoint_policies.dots_saveable, "jax.checkpoint_policies.dots_saveable"),
        (weft.config.ConfigBase, "weft.config.ConfigBase"),
        (Layer, f"{__name__}.Layer"),
        (Layer.Part, f"{__name__}.Layer.Part"),
        (Layer.act, f"{__name__}.Layer.act"),
        (act, f"{__name__}.act"),
        (Colour, f"{__name__}.Colour"),
    ],
)
def test_names_round_trip(obj, name):
    assert reference_to(obj) == name
    assert resolve_reference(name, allow=(__name__, "numpy.tanh", "ml_dtypes")) is obj


@pytest.mark.parametrize(
    "obj",
    [lambda: 1, functools.partial(act), 3, Layer.default_config, object(), types.SimpleNamespace()],
)
def test_values_without_name(obj):
    assert reference_to(obj) is None


def rejection_of(name, **kwargs):
    with pytest.raises(ConfigReferenceError) as error:
        resolve_reference(name, **kwargs)
    return str(error.value)


class Connects(Configurable):
    _needs_allow = True


class ConnectsToo(Connects):
    pass


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "posix.system",
        "subprocess.Popen",
        "builtins.eval",
        "builtins.exec",
        "importlib.import_module",
        "sys.modules",
        "os",
        "weft.config.references.sys",
        "weft.config.references.sys.exit",
        "weft.config.references.importlib.import_module",
        "weft.config.references.Configurable.default_config",
        "numpy.os.system",
        "jax.os",
        "optax.jnp.load",
        "jax.numpy",
        "jax.numpy.load",
        "numpy.load",
        "numpy.savetxt",
        "numpy.testing.runstring",
        "jax.debug.callback",
        "jax.tree.map",
        "optax.inject_hyperparams",
        "optax._src.alias.sgd",
        "weft.traverse_util.path_aware_map",
        "weft.jax_utils.partial_eval_by_shape",
        "weft.config.get_named_trainer_config",
        "weft.config.from_text",
        "weft.input.file_cache.cached_bytes",
        f"{__name__}.act",
        f"{__name__}.Colour.RED",
        f"{__name__}.Point",
        f"{__name__}.os.system",
        f"{__name__}.jax.nn.gelu",
        f"{__name__}.Connects",
        f"{__name__}.ConnectsToo",
    ],
)
@pytest.mark.parametrize("use", ["value", "target", "partial", "record"])
def test_forbidden_names(name, use):
    message = rejection_of(name, use=use)
    assert f"a text may not name {name!r}" in message
    assert f"allow=({name!r},)" in message and f"--allow {name}" in message


@pytest.mark.parametrize(
    "name",
    [
        "weft.config.config.ConfigBase.__init__",
        "weft.config.config.ConfigBase.__init__.__globals__",
        "int.__subclasses__",
        "object.__reduce__",
        "numpy.float32.__class__",
        "weft.errors._base.similar_names.__code__",
        "weft.config.references._lookup_in_module.__globals__",
        "jax.nn.relu.__wrapped__",
    ],
)
def test_underscore_names_are_rejected(name):
    assert "may not name" in rejection_of(name)


@pytest.mark.parametrize(
    ("name", "uses"),
    [
        ("optax.sgd", {"value", "target", "partial"}),
        ("jax.nn.initializers.normal", {"value", "target", "partial"}),
        ("weft.input.text.lm_text_source", {"target"}),
        ("weft.input.tokenizers.HuggingFaceTokenizer", {"target"}),
        ("weft.trainer.mesh.HybridMeshShape", {"record"}),
        ("jax.lax.Precision.HIGHEST", {"value"}),
        (f"{__name__}.Layer", {"value"}),
        ("weft.config.ConfigBase", {"value"}),
    ],
)
def test_listed_names_by_use(name, uses):
    for use in ("value", "target", "partial", "record"):
        if use in uses:
            assert resolve_reference(name, use=use) is not None
        else:
            rejection_of(name, use=use)


def test_file_readers_are_only_configured():
    assert rejection_of("weft.input.text.lm_text_source") == (
        "a text may not name 'weft.input.text.lm_text_source' here, because it reads files. Write "
        "it as config_for_function(weft.input.text.lm_text_source)(…), or set this value in a "
        "program."
    )


@pytest.mark.parametrize(
    "name", ["numpy.load", f"{__name__}.act", f"{__name__}.Colour.RED", f"{__name__}.ConnectsToo"]
)
def test_allow_accepts_name_or_module(name):
    for allow in (name, name.rpartition(".")[0]):
        assert resolve_reference(name, allow=(allow,)) is not None
    rejection_of(name, allow=(name + "s", "os"))


def test_imports_of_an_allowed_module_are_rejected():
    assert rejection_of(f"{__name__}.os.system", allow=(__name__,)) == (
        f"a text may not name '{__name__}.os.system': {__name__}.os only imports it."
    )


def test_outside_effects_are_declared():
    name = "weft.trainer.summary_writer.trackers.WandBWriter"
    assert rejection_of(name).startswith(
        f"a text may not name {name!r}: WandBWriter has effects outside of the run, such as "
        "connections"
    )
    resolve_reference(name, allow=("weft.trainer.summary_writer.trackers",))


def test_alias_is_not_listed(monkeypatch):
    module = types.ModuleType("weft.innocent")
    module.sgd = optax.sgd
    monkeypatch.setitem(sys.modules, "weft.innocent", module)
    assert "Did you mean 'optax.sgd'?" in rejection_of("weft.innocent.sgd", use="target")


def test_imported_configurables_may_be_named():
    assert resolve_reference(f"{__name__}.Layer") is Layer


def test_private_module_has_no_names(monkeypatch):
    module = types.ModuleType("weft._inside")
    module.Layer = Layer
    monkeypatch.setitem(sys.modules, "weft._inside", module)
    rejection_of("weft._inside.Layer")


@pytest.mark.parametrize("use", ["value", "target", "partial", "record"])
def test_names_do_not_import_modules(use, tmp_path, monkeypatch):
    (tmp_path / "hostile_module.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    for name in (
        *("hostile_module.Layer", "antigravity.x", "jax.tools.x.y", "weft.__main__.main"),
        *("numpy.f2py.__main__.x", "weft.launch.local.LocalJob", "weft.cli.train.run"),
        "jax.experimental.pallas.x",
    ):
        before |= {m for m in sys.modules if m.startswith("weft")}
        rejection_of(name, use=use)
    assert {m for m in sys.modules if not m.startswith("weft.")} <= before
    assert not any(m.startswith(("weft.launch", "weft.cli")) for m in set(sys.modules) - before)


def test_allowed_packages_are_imported(tmp_path, monkeypatch):
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "acts.py").write_text("import math\n\ndef act(x):\n    return x\n", encoding="utf-8")
    (package / "broken.py").write_text("import a_module_that_is_not_there\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = resolve_reference("own_package.acts.act", allow=("own_package",), use="target")
    assert found(3) == 3
    assert "own_package.acts.math" in rejection_of("own_package.acts.math", allow=("own_package",))
    message = rejection_of("own_package.broken.act", allow=("own_package",))
    assert message == (
        "own_package.broken cannot be imported: No module named 'a_module_that_is_not_there'."
    )
    for name in [name for name in sys.modules if name.startswith("own_package")]:
        monkeypatch.delitem(sys.modules, name)


def test_misspelt_name_suggests_nearest():
    assert "Did you mean 'optax.adam" in rejection_of("optax.adamv")
    assert "Did you mean 'weft.hierarchy.layers.linear.Linear'" in rejection_of(
        "weft.hierarchy.layers.linear.Linaer"
    )
    assert "Did you mean 'jax.numpy.float32'" in rejection_of("float32")


def test_rejection_explains_the_fix():
    assert rejection_of("my_package.squares", use="target") == (
        "a text may not name 'my_package.squares' as a target of a config: it is neither listed in "
        "weft.config.references nor a configurable class of an imported module. If you trust it, "
        "allow it: from_text(…, allow=('my_package.squares',)), or --allow my_package.squares on "
        "the command line."
    )


LISTED = sorted(VALUES | TARGETS | RECORDS | ENUMS)


def test_listed_names_resolve():
    for name in LISTED:
        found = _lookup_in_module(*_split_reference(name, ()))
        if name in ENUMS:
            assert issubclass(found, enum.Enum), name
            continue
        assert callable(found), name
        if name in RECORDS:
            is_record = dataclasses.is_dataclass(found) or hasattr(found, "_fields")
            assert is_record or issubclass(found, np.generic), name
        # Two are partials, which a text writes out.
        is_listed = defining_name(str(reference_to(found))) in LISTED
        assert is_listed or isinstance(found, functools.partial), name


ROOT = Path(weft.config.__file__).parents[1]
HARMFUL_CALLS = {
    "eval",
    "exec",
    "__import__",
    "import_module",
    "unlink",
    "write_text",
    "write_bytes",
}
HARMFUL_MODULES = {"shutil", "subprocess", "pickle", "socket", "ctypes", "runpy"}
HARMFUL_OF_OS = {"remove", "rename", "replace", "system", "kill", "makedirs", "truncate", "rmdir"}


def is_harmful(node: ast.AST) -> bool:
    """Returns whether code writes or deletes files, starts processes or imports by name."""
    for call in ast.walk(node):
        if not isinstance(call, ast.Call):
            continue
        if isinstance(call.func, ast.Name):
            modes = [a.value for a in call.args[1:2] if isinstance(a, ast.Constant)]
            writes = call.func.id == "open" and any(set(str(mode)) & set("wax+") for mode in modes)
            if writes or call.func.id in HARMFUL_CALLS:
                return True
        if isinstance(call.func, ast.Attribute):
            of = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
            if call.func.attr in HARMFUL_CALLS or of in HARMFUL_MODULES:
                return True
            if of == "os" and call.func.attr in HARMFUL_OF_OS:
                return True
    return False


def callables_of_weft():
    """Yields every function and class in weft by its dotted name, with the code that a call of it
    runs.
    """
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(("weft", *path.relative_to(ROOT).with_suffix("").parts))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            name = f"{module.removesuffix('.__init__')}.{getattr(node, 'name', '')}"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node
            elif isinstance(node, ast.ClassDef):
                yield from (
                    (name, method)
                    for method in node.body
                    if getattr(method, "name", "") in ("__init__", "__new__", "__post_init__")
                )


def test_listed_names_are_harmless():
    found = list(callables_of_weft())
    assert "weft.config.text_writer.to_text" in dict(found)
    harmful = {name for name, code in found if is_harmful(code)}
    assert "weft.config.configurable.get_named_trainer_config" in harmful
    assert harmful & (VALUES | TARGETS | RECORDS) == set()


@pytest.mark.parametrize("name", ["save_every_n_steps_policy", "eval_every_n_steps_policy"])
def test_policies_have_the_names_that_runs_have_written(name):
    cfg = weft.config.from_text(f"config_for_function(weft.trainer.{name})(n=3)")
    assert cfg.n == 3
