"""Pages that quote code of the package quote what is there."""

import importlib.util

import pytest

from tests.pages import ROOT

spec = importlib.util.spec_from_file_location("quotes", ROOT / "docs/quotes.py")
quotes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quotes)


def test_a_definition_is_shown_without_its_docstring():
    block = quotes.on_page_markdown("<!-- quote docs/quotes.py on_page_markdown -->")
    assert block == (
        '``` {.python title="docs/quotes.py"}\n'
        "def on_page_markdown(markdown: str, **kwargs: object) -> str:\n"
        "    return QUOTE.sub(lambda comment: quoted(comment[1], comment[2]), markdown)\n"
        "```"
    )


def test_an_overloaded_function_is_shown_with_its_body():
    block = quotes.quoted("weft/hierarchy/module.py", "functional")
    assert "@overload" not in block
    assert "return result, outputs" in block


def test_a_quote_of_nothing_ends_the_build():
    with pytest.raises(LookupError, match="does not define gone, which a page quotes"):
        quotes.on_page_markdown("<!-- quote docs/quotes.py quoted.gone -->")


def test_every_quote_of_the_pages_is_found():
    pages = [page.read_text(encoding="utf-8") for page in ROOT.glob("docs/**/*.md")]
    found = [quotes.quoted(*names) for page in pages for names in quotes.QUOTE.findall(page)]
    assert all(len(block.splitlines()) > 3 for block in found)
