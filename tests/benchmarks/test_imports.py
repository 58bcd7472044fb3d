"""Distributions that an extra installs, for planted packages, and lazy imports."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

import pytest

from benchmarks import imports


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution of one file as pip does, in a folder that is on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, size, *, requires=(), extras=()):
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        lines += [f"Requires-Dist: {text}" for text in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (tmp_path / f"{name}.py").write_text(" " * size, encoding="utf-8")
        (info / "RECORD").write_text(f"{name}.py,,{size}\n{name}.pyc,,\n", encoding="utf-8")

    return make


def test_extra_size_excludes_base_dependencies(install):
    install("base-x", 1_000_000)
    install("deep", 2_000_000, requires=["extra_top", "base_x"])
    install("extra-top", 3_000_000, requires=["deep[fast]", "never; extra == 'other'"])
    wanted = ["base-x", "extra-top; extra == 'more'", "absent; extra == 'lost'"]
    install("product", 4_000_000, requires=wanted, extras=["more", "lost"])
    whole, more = imports.sizes(distribution("product"))
    assert whole.note.startswith("5.0 MB in 2 distributions; product alone 4.0 MB")
    assert whole.note.endswith("not installed, so not counted: lost (absent)")
    assert more.question == "size of the extra more / of product and its needs"
    assert more.median == 1.0
    assert more.note == "5.0 MB in 2 distributions; extra-top alone 3.0 MB"


def test_missing_package_is_reported(install):
    install("product", 1, requires=["absent>=2"])
    with pytest.raises(PackageNotFoundError, match="absent"):
        imports.closure(distribution("product"))


# Each takes long to import, and only some programs use it.
_RARE = {"jax.extend", "jax.experimental.checkify", "jax.experimental.pallas", "msgpack", "optax"}
_LEFT_OUT = {
    "weft.nnx": _RARE | {"weft.config", "weft.core.scope", "weft.serialization.msgpack"},
    "weft.hierarchy.layers": _RARE | {"weft.core.scope", "weft.serialization.msgpack"},
    "weft.linen": _RARE | {"weft.core.nn", "weft.serialization.msgpack"},
}
_IMPORTED = """
import json, sys
for name in sys.argv[1:]:
    __import__(name)
    print(json.dumps(sorted(sys.modules)))
"""


def test_slow_imports_are_lazy():
    # All in one process: what the first of them leaves out, the next ones may bring.
    command = [sys.executable, "-c", _IMPORTED, *_LEFT_OUT]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    seen = [set(json.loads(line)) for line in done.stdout.splitlines()]
    early = {
        name: left & found for (name, left), found in zip(_LEFT_OUT.items(), seen, strict=True)
    }
    assert early == {name: set() for name in _LEFT_OUT}
