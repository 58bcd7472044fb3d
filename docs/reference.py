"""Adds a page for each public package to the site: its names, from the table of `__init__.pyi`.

MkDocs calls the hooks before it reads the pages; mkdocstrings puts in the docstrings.
"""

import ast
import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Modules that users import by name, next to the packages.
MODULES = (
    "weft.errors",
    "weft.struct",
    "weft.traverse_util",
    "weft.typing",
    "weft.utils",
    "weft.jax_utils",
    "weft.core.frozen_dict",
    "weft.core.meta",
    "weft.trainer.profiling",
    "weft.functional.initializers",
)


def on_config(config: MkDocsConfig) -> None:
    """Lists the pages under Reference, and drops sections that have none."""
    names = sorted({*packages(), *MODULES})
    for section in config.nav or []:
        if "Reference" in section:
            section["Reference"] = [{name: f"reference/{name}.md"} for name in names]
    config.nav = [section for section in config.nav or [] if any(section.values())]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def pages() -> dict[str, str]:
    """Returns the pages' texts by package. A name is explained in the innermost that exports it."""
    sources = griffe.load("weft", search_paths=[ROOT], resolve_aliases=True)
    tables = {name: names_of(path) for name, path in packages().items()}
    homes: dict[str, str] = {}  # package, by the full name of the original
    for name in sorted(tables, key=lambda name: name.count("."), reverse=True):
        for original in tables[name].values():
            homes.setdefault(original, name)
    texts = {}
    for name, table in sorted(tables.items()):
        own = [public for public, original in table.items() if homes[original] == name]
        package = sources[name.removeprefix("weft.")] if "." in name else sources
        undocumented = [x for x in own if not _is_explained(package[x])]
        links = [f"[`{x}`][{homes[table[x]]}.{x}]" for x in table if homes[table[x]] != name]
        links = sorted(links + [f"`{x}`" for x in undocumented])
        texts[name] = "\n\n".join(
            [
                f"# {name}",
                f"::: {name}\n    options:\n      members: false\n      heading_level: 1\n"
                "      show_root_heading: false\n      show_root_toc_entry: false",
                *([f"Also here: {', '.join(links)}."] if links else []),
                *(
                    f"::: {table[x] if package[x].is_module else f'{name}.{x}'}"
                    for x in sorted({*own} - {*undocumented}, key=str.lower)
                ),
            ]
        )
    for name in MODULES:
        texts[name] = f"# {name}\n\n::: {name}\n    options:\n      show_root_heading: false\n"
    return texts


def _is_explained(thing: griffe.Object | griffe.Alias) -> bool:
    """Returns whether it has a docstring; what `a, b = ...` defines is not found in the sources."""
    try:
        return thing.docstring is not None
    except griffe.AliasResolutionError:
        return False


class ExamplesAsCode(griffe.Extension):
    """Shows examples of docstrings as code, which Markdown takes for quotations."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Changes a docstring as it is loaded."""
        if obj.docstring is not None:
            example = re.compile(r"^( *)>>> (?:.+\n?)+", re.MULTILINE)
            obj.docstring.value = example.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    indent, text = example[1], example[0].rstrip("\n")
    return f"{indent}```pycon\n{text}\n{indent}```\n"


def packages() -> dict[str, Path]:
    """Returns the tables of public names, by package."""
    tables = (ROOT / "weft").rglob("__init__.pyi")
    return {".".join(path.parent.relative_to(ROOT).parts): path for path in tables}


def names_of(table: Path) -> dict[str, str]:
    """Returns the full names of a table's originals by public name, without modules and JAX's."""
    imports = [x for x in ast.parse(table.read_text()).body if isinstance(x, ast.ImportFrom)]
    names = {x.asname or x.name: f"{i.module}.{x.name}" for i in imports for x in i.names}
    return {
        public: name
        for public, name in names.items()
        if name.startswith("weft.") and name.count(".") > 1 and not _is_module(name)
    }


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()
