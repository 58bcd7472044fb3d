"""The rules that no linter knows: the length of functions, and whose names may be used."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "weft").rglob("*.py"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Returns the parts of a file that the rules are about."""
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> list[str]:
    """Returns the absolute dotted names that a file imports, `from a import b` as `a.b`."""
    names = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_modules_are_found():
    assert MODULES


def lines_of_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the number of lines of a function after its signature and its docstring."""
    statements = function.body
    if ast.get_docstring(function) is not None:
        statements = statements[1:]
    if not statements:
        return 0
    return (statements[-1].end_lineno or 0) - statements[0].lineno + 1


def test_no_body_of_a_function_is_longer_than_100_lines():
    long = []
    for path in MODULES:
        for node in nodes(path):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and lines_of_body(node) > 100:
                long.append(f"{shown(path)}:{node.lineno} {node.name}")
    assert long == []


def test_only_public_names_of_jax_are_used():
    private = [
        f"{shown(path)}: {name}"
        for path in MODULES
        for name in imported(path)
        if name.startswith("jax.") and any(part.startswith("_") for part in name.split("."))
    ]
    attributes = [
        f"{shown(path)}:{node.lineno} jax.{node.attr}"
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "jax"
        and node.attr.startswith("_")
        and not node.attr.startswith("__")  # jax.__version__ is for everybody
    ]
    assert private + attributes == []


def test_only_interop_imports_flax_and_axlearn():
    foreign = [
        f"{shown(path)}: {name}"
        for path in MODULES
        if "interop" not in path.relative_to(ROOT / "weft").parts
        for name in imported(path)
        if name.split(".")[0] in {"flax", "axlearn"}
    ]
    assert foreign == []


PROCESS_CALLS = ("Popen", "run", "call", "check_call", "check_output")


def has_no_encoding(call: ast.Call) -> bool:
    """Returns whether a call reads or writes text in the encoding of the locale.

    Ruff's rule PLW1514 finds `open`, but not the methods of most paths, nor pipes.
    """
    keywords = {keyword.arg for keyword in call.keywords}
    if "encoding" in keywords:
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else None
    if name == "read_text":
        return not call.args
    if name == "write_text":
        return len(call.args) < 2
    return bool(keywords & {"text", "universal_newlines"} and name in PROCESS_CALLS)


def test_every_text_names_its_encoding():
    folders = ("weft", "tests", "docs", "examples", "benchmarks")
    places = []
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in ("read_text(", "write_text(", "text=True")):
            continue
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        places += [f"{shown(path)}:{call.lineno}" for call in calls if has_no_encoding(call)]
    assert places == []
