"""Quotes code of the package in pages, so that an explanation shows the code as it is.

A page names a definition in a comment on a line of its own; a dot leads to a method or an inner
function. It becomes a block of code without the definition's docstring:

    <!-- quote weft/lifting/mapping.py vmap.call -->
"""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUOTE = re.compile(r"^<!-- quote (\S+) (\S+) -->$", re.MULTILINE)

Definition = ast.FunctionDef | ast.ClassDef


def on_page_markdown(markdown: str, **kwargs: object) -> str:
    """Replaces the comments of a page by the code that they name."""
    return QUOTE.sub(lambda comment: quoted(comment[1], comment[2]), markdown)


def quoted(path: str, name: str) -> str:
    """Returns a definition in a file of the repository as a block of code.

    Raises a LookupError if the file does not define it.
    """
    source = (ROOT / path).read_text(encoding="utf-8")
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        node = _definition_below(node, part, path)
    assert isinstance(node, Definition)
    decorators = [decorator.lineno for decorator in node.decorator_list]
    first = min([node.lineno, *decorators])
    lines = source.splitlines()
    if ast.get_docstring(node) is None:
        shown = lines[first - 1 : node.end_lineno]
    else:
        docstring = node.body[0]
        shown = (
            lines[first - 1 : docstring.lineno - 1]
            + lines[docstring.end_lineno : node.end_lineno]
        )
    code = textwrap.dedent("\n".join(shown))
    return f'``` {{.python title="{path}"}}\n{code}\n```'


def _definition_below(parent: ast.AST, name: str, path: str) -> Definition:
    for node in ast.walk(parent):
        if (
            isinstance(node, Definition)
            and node.name == name
            and not _is_overload(node)
        ):
            return node
    raise LookupError(f"{path} does not define {name}, which a page quotes.")


def _is_overload(node: Definition) -> bool:
    """Returns whether a definition is a signature for type checkers, without a body."""
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    return "overload" in names or "typing.overload" in names
