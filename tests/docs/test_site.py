"""The check of a built site finds dead links, loads from the network, names no search finds."""

import importlib.util
import json

import pytest

from tests.pages import ROOT

SPEC = importlib.util.spec_from_file_location("check", ROOT / "docs/check.py")
check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check)


@pytest.fixture
def site(tmp_path):
    (tmp_path / "guide").mkdir()
    (tmp_path / "index.html").write_text('<h2 id="install">Install</h2>', encoding="utf-8")
    (tmp_path / "plot.png").touch()
    return tmp_path


@pytest.mark.parametrize(
    "html",
    [
        '<a href="../index.html">start</a>',
        '<a href="../index.html#install">install</a>',
        '<a class="x"\n   href="..">start</a>',
        '<a href="#here">here</a><a id="here"></a>',
        '<a href="https://example.org/x">elsewhere</a>',
        '<a href="mailto:someone@example.org">mail</a>',
        '<img src="../plot.png?v=1">',
        '<img src="data:image/png;base64,AAAA">',
        '<pre>&lt;a href="gone.html"&gt;</pre>',
        '<!-- <a href="gone.html"> -->',
        '<link rel="canonical" href="https://example.org/x">',
    ],
)
def test_check_accepts(site, html):
    (site / "guide/page.html").write_text(html, encoding="utf-8")
    assert check.dead_links(site) == []


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ('<a href="gone.html">x</a>', "no file gone.html"),
        ("<a href=gone.html>x</a>", "no file gone.html"),
        ('<a href="/index.html">x</a>', "no file /index.html"),
        ('<a href="../index.html#gone">x</a>', "no anchor ../index.html#gone"),
        ('<a href="#gone">x</a>', "no anchor #gone"),
        ('<img alt="a > b" src="gone.png">', "no file gone.png"),
        ('<img srcset="gone.png 2x">', "no file gone.png"),
        (
            '<script src="https://cdn.example.org/x.js"></script>',
            "loads https://cdn.example.org/x.js from the network",
        ),
        ('<pre class="mermaid"></pre>', "loads https://unpkg.com/mermaid from the network"),
        (
            '<link rel="stylesheet" href="//fonts.example.org/x">',
            "loads //fonts.example.org/x from the network",
        ),
        (
            "<style>@import 'https://example.org/x.css';</style>",
            "loads https://example.org/x.css from the network",
        ),
    ],
)
def test_check_finds(site, html, found):
    (site / "guide/page.html").write_text(html, encoding="utf-8")
    assert check.dead_links(site) == [f"guide/page.html: {found}"]


def test_check_finds_what_a_stylesheet_loads(site):
    (site / "style.css").write_text(
        "a { background: url(https://example.org/x.png) }", encoding="utf-8"
    )
    assert check.dead_links(site) == ["style.css: loads https://example.org/x.png from the network"]


def test_check_finds_names_that_the_search_does_not_know(site):
    (site / "search").mkdir()
    entries = [{"title": "weft.nnx.BatchNorm dataclass"}, {"title": "weft.linen"}]
    (site / "search/search_index.json").write_text(json.dumps({"docs": entries}), encoding="utf-8")
    names = {"weft.nnx.BatchNorm", "weft.linen.BatchNorm"}
    assert check.unknown_to_search(site, names) == [
        "the search has no entry for weft.linen.BatchNorm"
    ]


def test_public_names_are_those_of_the_tables():
    names = check.public_names()
    assert {"weft.fit", "weft.nnx.BatchNorm", "weft.nnx.relu", "weft.linen.spmd"} < names
    assert not {"weft.nnx", "weft.core.lift"} & names
