"""Counts over the source files of weft/, read as text: sizes, imports, helpers and types."""

import ast
import collections
import dataclasses
import io
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

_BETWEEN = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass
class Source:
    """A Python file.

    Attributes:
        module: its dotted name.
        text: what it holds.
        tree: its syntax tree.
    """

    module: str
    text: str
    tree: ast.Module

    def docstring_lines(self) -> set[int]:
        lines = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module | ast.ClassDef | _Function) and _has_docstring(node):
                lines |= _lines(node.body[0])
        return lines

    def code_lines(self) -> set[int]:
        """The lines with a token that is neither a comment nor part of a docstring."""
        lines = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _BETWEEN:
                lines |= set(range(token.start[0], token.end[0] + 1))
        return lines - self.docstring_lines()

    def import_lines(self) -> set[int]:
        """The lines of imports, at any depth, and of `__all__`."""
        lines = set()
        for node in ast.walk(self.tree):
            targets = node.targets if isinstance(node, ast.Assign) else ()
            names = any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets)
            if names or isinstance(node, ast.Import | ast.ImportFrom):
                lines |= _lines(node)
        return lines

    def imports(self) -> Iterator[str]:
        """The dotted names that it imports, at any depth; `from a import b` as `a.b`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def parameters(self) -> Iterator[ast.expr]:
        """The annotations of all parameters that have one."""
        for node in ast.walk(self.tree):
            if isinstance(node, _Function):
                args = node.args
                every = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
                yield from (arg.annotation for arg in every if arg and arg.annotation)

    def small_helpers(self) -> Iterator[str]:
        """Private functions of at most six lines that this file names once."""
        uses: collections.Counter[str] = collections.Counter()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
        for node in ast.walk(self.tree):
            if (
                isinstance(node, _Function)
                and _is_private(node.name)
                and len(_lines(node)) <= 6
                and uses[node.name] == 1
            ):
                yield node.name


def sources(root: Path) -> list[Source]:
    """Reads every file of the package at `root`."""
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found.append(Source(module, text, ast.parse(text)))
    return found


def import_graph(files: Iterable[Source]) -> dict[str, set[str]]:
    """Returns the modules of the package that each module imports, inside functions too."""
    files = list(files)
    modules = {file.module for file in files}
    graph: dict[str, set[str]] = {}
    for file in files:
        graph[file.module] = set()
        for name in file.imports():
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name and name != file.module:
                graph[file.module].add(name)
    return graph


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Returns the groups of modules that import each other, by way of any number of others."""

    def reachable(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for name in graph[todo.pop()] - seen:
                seen.add(name)
                todo.append(name)
        return seen

    reached = {name: reachable(name) for name in graph}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph
    }
    return [set(group) for group in groups if len(group) > 1]


def is_any(annotation: ast.expr) -> bool:
    """Whether an annotation is `Any`, which allows everything."""
    return ast.unparse(annotation) in {"Any", "typing.Any"}


def _has_docstring(node: ast.Module | ast.ClassDef | _Function) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def _lines(node: ast.stmt | ast.AST) -> set[int]:
    assert isinstance(node, ast.stmt) and node.end_lineno
    return set(range(node.lineno, node.end_lineno + 1))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
