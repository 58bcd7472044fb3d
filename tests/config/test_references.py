import ast
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
from weft.config import ConfigReferenceError, Configurable
from weft.config.references import _is_harmless, reference_to, resolve_reference


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
        (weft.config.ConfigBase, "weft.config.config.ConfigBase"),
        (Layer, f"{__name__}.Layer"),
        (Layer.Part, f"{__name__}.Layer.Part"),
        (Layer.act, f"{__name__}.Layer.act"),
        (act, f"{__name__}.act"),
        (Colour, f"{__name__}.Colour"),
    ],
)
def test_names_lead_back(obj, name):
    assert reference_to(obj) == name
    assert resolve_reference(name, allow=(__name__,)) is obj


@pytest.mark.parametrize(
    "obj",
    [lambda: 1, functools.partial(act), 3, Layer.default_config, object(), types.SimpleNamespace()],
)
def test_what_has_no_name(obj):
    assert reference_to(obj) is None


def test_a_local_class_has_no_name():
    class Local:
        pass

    assert reference_to(Local) is None


def test_a_name_that_means_something_else_is_none():
    def impostor():
        return 1

    impostor.__qualname__ = "act"
    assert reference_to(impostor) is None


def refused(name, **kwargs):
    with pytest.raises(ConfigReferenceError) as error:
        resolve_reference(name, **kwargs)
    return str(error.value)


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
        "numpy.os.system",
        "jax.os",
        "optax.jnp.load",
        "jax.numpy",
        f"{__name__}.act",
        f"{__name__}.Colour.RED",
        f"{__name__}.os.system",
    ],
)
def test_what_a_text_may_not_name(name):
    assert name in refused(name) or "there is no" in refused(name)


@pytest.mark.parametrize(
    "name",
    [
        "weft.config.config.ConfigBase.__init__",
        "weft.config.config.ConfigBase.__init__.__globals__",
        "int.__subclasses__",
        "object.__reduce__",
        "numpy.float32.__class__",
        "weft.config.names.similar_names.__code__",
        "weft.config.references._find.__globals__",
    ],
)
def test_nothing_is_reached_through_underscores(name):
    assert "is not known" in refused(name)


@pytest.mark.parametrize(
    "name",
    [
        "numpy.load",
        "numpy.testing.runstring",
        "jax.numpy.load",
        "jax.debug.callback",
        "weft.config.get_named_trainer_config",
        "weft.config.recipes.get_named_trainer_config",
        "weft.config.from_text",
        "weft.input.file_cache.made_once",
    ],
)
def test_what_a_text_may_not_call(name):
    __import__("numpy.testing")
    message = refused(name, call=True)
    assert f"a text may not have {name!r} called with arguments that it chooses" in message
    assert f"pass allow=({name!r},)" in message
    assert callable(resolve_reference(name, call=True, allow=(name,)))


def test_another_name_does_not_make_it_harmless(monkeypatch):
    module = types.ModuleType("weft.innocent")
    module.find = weft.config.get_named_trainer_config
    monkeypatch.setitem(sys.modules, "weft.innocent", module)
    assert "may not have" in refused("weft.innocent.find", call=True)


@pytest.mark.parametrize("name", ["optax.sgd", "jax.nn.gelu", "jax.nn.initializers.normal"])
def test_what_a_text_may_call(name):
    assert callable(resolve_reference(name, call=True))


def test_configurables_of_imported_modules_may_be_named():
    assert resolve_reference(f"{__name__}.Layer") is Layer


def test_nothing_is_imported_because_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "hostile_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "'hostile_module.Layer' is not known" in refused("hostile_module.Layer")
    assert "hostile_module" not in sys.modules
    for name in ("antigravity.x", "jax.tools.x.y", "weft.__main__.main", "numpy.f2py.__main__.x"):
        before = set(sys.modules)
        refused(name)
        assert set(sys.modules) == before


def test_allowed_packages_are_imported(tmp_path, monkeypatch):
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "acts.py").write_text("import math\n\ndef act(x):\n    return x\n")
    (package / "broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = resolve_reference("own_package.acts.act", allow=("own_package",), call=True)
    assert found(3) == 3
    assert "own_package.acts.math" in refused("own_package.acts.math", allow=("own_package",))
    message = refused("own_package.broken.act", allow=("own_package",))
    assert message == (
        "own_package.broken cannot be imported: No module named 'a_module_that_is_not_there'."
    )
    for name in [name for name in sys.modules if name.startswith("own_package")]:
        monkeypatch.delitem(sys.modules, name)


def test_a_misspelt_name_gets_the_nearest():
    message = refused("optax.adamv")
    assert message.startswith("there is no 'adamv' in optax. Did you mean 'adam")


def test_an_unknown_name_says_what_can_be_done():
    message = refused("my_package.Layer")
    assert "pass allow=('my_package',)" in message
    assert "weft, jax, optax, numpy" in message


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


def does_harm(node: ast.AST) -> bool:
    """Whether a piece of code writes or deletes files, starts processes or imports by name."""
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
    """Every function and class in weft by its dotted name, with the code that a call of it runs."""
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


def test_no_text_has_harm_done_by_what_it_may_call():
    found = list(callables_of_weft())
    assert "weft.config.text_write.to_text" in dict(found)
    harmful = [name for name, code in found if does_harm(code)]
    assert "weft.config.recipes.get_named_trainer_config" in harmful
    # What this lists belongs on the list of exceptions in weft/config/references.py.
    assert [name for name in harmful if _is_harmless(None, name)] == []
