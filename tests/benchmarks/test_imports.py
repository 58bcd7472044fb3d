"""Which distributions an extra brings, on distributions that are made here."""

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
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (tmp_path / f"{name}.py").write_text(" " * size)
        (info / "RECORD").write_text(f"{name}.py,,{size}\n{name}.pyc,,\n")

    return make


def test_an_extra_brings_what_it_needs_beyond_what_is_needed_anyway(install):
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


def test_what_is_not_installed_is_named(install):
    install("product", 1, requires=["absent>=2"])
    with pytest.raises(PackageNotFoundError, match="absent"):
        imports.closure(distribution("product"))
