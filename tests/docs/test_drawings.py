"""The drawings of the docs: the files are current, and pages show them with texts."""

import re
import xml.etree.ElementTree as ET

import pytest

from docs.concepts import drawings
from docs.concepts.drawing import Drawing
from docs.images import run
from tests.pages import ROOT

DOCS = ROOT / "docs"
PICTURES = [
    (page, picture)
    for page in (*sorted(DOCS.rglob("*.md")), ROOT / "README.md")
    for picture in re.findall(r"<picture>.*?</picture>", page.read_text(encoding="utf-8"), re.S)
]


@pytest.mark.parametrize("name, text", list(drawings.files()), ids=lambda x: x.partition("\n")[0])
def test_file_is_current(name, text):
    path = drawings.FOLDER / name
    assert path.read_text(encoding="utf-8") == text, "run python -m docs.concepts.drawings"
    assert ET.fromstring(text).get("width") in {"720", "360"}


@pytest.mark.parametrize("name", run.COLUMNS)
def test_picture_of_a_run_is_current(name):
    text = (run.FOLDER / name).read_text(encoding="utf-8")
    assert text == run.svg(run.COLUMNS[name]), "run python -m docs.images.run"
    assert "440/600" in text


def test_pages_have_every_drawing():
    pages = [
        (drawings.FOLDER / name).read_text(encoding="utf-8") for name in ("index.md", "inside.md")
    ]
    shown = set(re.findall(r'(?:src|srcset)="(.*?)"', "".join(pages)))
    assert shown == {name for name, _ in drawings.files()}


@pytest.mark.parametrize("page, picture", PICTURES)
def test_picture_has_files_and_a_text(page, picture):
    sources = re.findall(r'(?:src|srcset)="(.*?)"', picture)
    assert sources and [source for source in sources if not (page.parent / source).exists()] == []
    assert re.search(r'<img [^>]*alt="[^"]{20,}"', picture)


def test_what_does_not_fit_is_refused():
    drawing = Drawing(200, 100)
    with pytest.raises(ValueError, match=r"needs .*, the box has 48"):
        drawing.box(0, 0, 60, 40, "a line that is too long")
    with pytest.raises(ValueError, match="are higher than 20"):
        drawing.box(0, 0, 60, 20, "a", "b")
    with pytest.raises(ValueError, match="leaves the drawing of 200 × 100"):
        drawing.box(150, 0, 60, 20, "a")
