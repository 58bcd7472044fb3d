"""Shows the repository's files that pages link to on the site, and names the repository.

The reference links to the source by `source:weft/x.py#L12`, which the templates in docs/docstrings
write.
"""

import os
import posixpath
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pygments
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).parents[1]
# Pages that are the repository's files.
ROOT_PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "examples.md": "examples/README.md",
    "security.md": "SECURITY.md",
}
_LINK = re.compile(r"(\]\()([^)#\s:]+)([^)\s]*\))")
_PAGE = """---
title: {path}
template: source.html
search: {{exclude: true}}
---
# {path}
"""


def on_config(config: MkDocsConfig) -> None:
    """Sets the links to the repository and to edit a page, and the list of versions."""
    if repository := _repository():
        config.repo_url = repository
        config.repo_name = (
            urlsplit(repository).path.strip("/").removesuffix(".git")
        )
        config.edit_uri = f"{repository}/edit/main/docs/"
        config.theme["features"].append("content.action.edit")
    if (
        "MIKE_DOCS_VERSION" in os.environ
    ):  # one of several versions, between which one can choose
        config.extra["version"] = {"provider": "mike", "default": "latest"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of source files: the package, and what other pages link to."""
    for page, path in ROOT_PAGES.items():
        files.append(
            File.generated(config, page, abs_src_path=str(ROOT / path))
        )
    shown = {
        path.relative_to(ROOT).as_posix() for path in ROOT.glob("weft/**/*.py")
    }
    for file in files.documentation_pages():
        for link in _LINK.findall(file.content_string):
            target = _target(file.src_uri, link[1])
            if target is not None and not target.startswith("docs/"):
                shown.add(target)
    shown -= {*ROOT_PAGES.values()}
    for path in sorted(shown):
        page = File.generated(
            config, f"source/{path}.md", content=_PAGE.format(path=path)
        )
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, **kwargs: object
) -> str:
    """Turns links to the repository's files into links to their pages, and names its address."""
    source = page.file.src_uri
    if config.repo_url:
        markdown = markdown.replace(
            "git clone REPOSITORY", f"git clone {config.repo_url}"
        )

    def to_page(link: re.Match[str]) -> str:
        target = _target(source, link[2])
        if target is None or (
            target.startswith("docs/") and source not in ROOT_PAGES
        ):
            return link[0]
        uri = (
            target.removeprefix("docs/")
            if target.startswith("docs/")
            else f"source/{target}.md"
        )
        for name, path in ROOT_PAGES.items():
            uri = name if target == path else uri
        return (
            link[1]
            + posixpath.relpath(uri, posixpath.dirname(source) or ".")
            + link[3]
        )

    return _LINK.sub(to_page, markdown)


def on_page_content(html: str, page: Page, **kwargs: object) -> str:
    """Highlights a page's file, and finishes the links to the source."""
    source = page.file.src_uri
    if source.startswith("source/"):
        html += _highlighted(source.removeprefix("source/").removesuffix(".md"))
    root = "../" * page.url.count("/")
    return re.sub(
        r'href="source:([^"#]*)', rf'href="{root}source/\1.html', html
    )


def _target(page: str, link: str) -> str | None:
    """Returns the path of the repository's file a page links to, None where there is none."""
    home = posixpath.dirname(ROOT_PAGES.get(page, f"docs/{page}"))
    path = posixpath.normpath(posixpath.join(home, link))
    return path if (ROOT / path).is_file() else None


def _highlighted(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    try:
        lexer = get_lexer_for_filename(path)
    except ClassNotFound:
        lexer = TextLexer()
    code = pygments.highlight(text, lexer, HtmlFormatter(nowrap=True)).rstrip(
        "\n"
    )
    lines = [
        f'<span id="L{n}"><a href="#L{n}" data-line="{n}"></a>{line}\n</span>'
        for n, line in enumerate(code.split("\n"), 1)
    ]
    return f'<div class="highlight lines"><pre><code>{"".join(lines)}</code></pre></div>'


def _repository() -> str | None:
    """Returns the repository's address: the variable REPOSITORY, or an https remote `origin`."""
    address = os.environ.get("REPOSITORY", "")
    if not address:
        command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
        try:
            address = subprocess.run(
                command, capture_output=True, encoding="utf-8"
            ).stdout.strip()
        except OSError:  # no git on this machine
            return None
    parts = urlsplit(address)
    if parts.scheme != "https" or parts.hostname is None:
        return None
    # Without a name or a password, which a remote may have.
    return f"https://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/').removesuffix('.git')}"
