"""Ranks guides first in the search of the site, by the words in which people ask.

`synonyms.txt` has the words for each guide, which become the tags of its page: the search counts a
tag more than a title. Pages that explain names and decisions come after pages that explain tasks.
`check.py` asks the built site the questions of `questions.txt`.
"""

import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

DOCS = Path(__file__).parent
LATER = ("reference/", "decisions/", "contributing", "changelog", "source/")
LATER_BOOST = 0.1


def on_post_build(config: MkDocsConfig) -> None:
    """Adds tags and boosts to the index of the search."""
    path = Path(config.site_dir, "search", "search_index.json")
    index = json.loads(path.read_text(encoding="utf-8"))
    words_of_page = synonyms()
    for entry in index["docs"]:
        location = entry["location"]
        if location in words_of_page:
            entry["tags"] = words_of_page.pop(location)
        if location.startswith(LATER):
            entry["boost"] = LATER_BOOST * entry.get("boost", 1)
    if words_of_page:
        raise LookupError(
            f"synonyms.txt names pages that the site lacks: {sorted(words_of_page)}."
        )
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def synonyms() -> dict[str, list[str]]:
    """Returns the words of `synonyms.txt` by the address of the page."""
    words_of_page = {}
    for line in (
        (DOCS / "synonyms.txt").read_text(encoding="utf-8").splitlines()
    ):
        if line and not line.startswith("#"):
            page, _, words = line.partition(": ")
            words_of_page[page.removesuffix(".md") + ".html"] = words.split()
    return words_of_page
