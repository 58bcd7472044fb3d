"""The pages of the documentation: their programs run in order and print what the pages say.

Those of the tutorials run when the site is built (docs/notebooks.py), and those of pages for users
of other libraries, which compare with these, in tests/parity/test_pages.py.
"""

import re
import subprocess

import pytest

from tests.pages import ROOT, blocks, files, programs, run_in_order
from weft.cli.arguments import parse_arguments

pytestmark = pytest.mark.usefixtures("one_device")

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# Errors and origins name these pages relative to the root; the others write to tmp_path.
NAMED = (
    "config.md",
    "nnx.md",
    "nnx-transforms.md",
)

# They train, and nothing in them depends on the number of devices.
TRAINING = (
    "any-model",
    "index",
    "launching",
    "moving-from-axlearn",
    "summary-writer",
    "training",
)


def named(pages):
    return pytest.mark.parametrize(
        "page", pages, ids=[page.relative_to(DOCS).with_suffix("").as_posix() for page in pages]
    )


@named(
    [
        page
        for page in PAGES
        if programs(page) and page.parent.name != "tutorials" and "compare.py" not in files(page)
    ]
)
def test_page_output_matches(page, monkeypatch, tmp_path, request):
    if page.stem not in TRAINING:
        request.getfixturevalue("all_devices")
    monkeypatch.chdir(ROOT if page.name in NAMED else tmp_path)
    for said, printed in run_in_order(page, monkeypatch):
        assert printed == said


@named([page for page in PAGES if "weft " in page.read_text(encoding="utf-8")])
def test_page_commands_parse(page):
    consoles = [block.text for block in blocks(page) if block.language == "console"]
    for command in re.findall(r"^\$ weft (.*?)(?:\s+[#>].*)?$", "".join(consoles), re.MULTILINE):
        assert parse_arguments(command.split()).command


def test_navigation_names_every_page():
    lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").splitlines()
    shown = {line.split(": ")[-1].strip().removeprefix("- ") for line in lines}
    assert not {page.relative_to(DOCS).as_posix() for page in PAGES} - shown


def test_index_of_decisions_names_every_decision():
    text = (DOCS / "decisions/index.md").read_text(encoding="utf-8")
    for page in DOCS.glob("decisions/0*.md"):
        title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert f"- [{title}]({page.name})" in text


@named(PAGES)
def test_page_links_exist(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


# The benchmarks write the tables of the other page.
@named([page for page in PAGES if page.stem != "performance-results"])
def test_heads_of_tables_name_their_columns(page):
    text = page.read_text(encoding="utf-8")
    heads = re.findall(r"^\|(.*)\|\n\|[-:| ]+\|$", text, re.MULTILINE)
    # In the corner, above the names of the rows, there may be nothing.
    columns = [cell.strip() for head in heads for cell in head.split("|")[1:]]
    assert "" not in columns


@named(PAGES)
def test_commands_of_the_repository_follow_where_to_get_it(page):
    text = page.read_text(encoding="utf-8")
    command = re.search(r"(`|\$ )make [a-z-]+|python examples/", text)
    if command is not None and page.parent.name != "decisions":
        assert "#get-the-files" in text[: command.start()]


def test_no_text_installs_the_other_distribution_of_that_name():
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    ).stdout.splitlines()
    install = re.compile(r"""\binstall\s+(-\S+\s+)*['"]?weft(?![-\w])""")
    wrong = []
    for name in files:
        if name.endswith((".md", ".py", ".toml", ".yml", ".html", ".txt", "Makefile")):
            text = (ROOT / name).read_text(encoding="utf-8")
            wrong += [f"{name}: {line[0]}" for line in install.finditer(text)]
    assert wrong == []


def test_import_lines_of_axlearn_work():
    page = (DOCS / "moving-from-axlearn.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `from axlearn\S* import (.*?)` \| `(.*?)` \|$", page, re.MULTILINE)
    assert len(lines) > 10
    for names, ours in lines:
        exec(ours.replace("…", names), {})
