"""Checks the English of docs, docstrings, comments and messages: python -m tests.house.english.

Three rules about style that had spread through the project: some words are not used, the spelling
is American, and the docstring of a function begins with a verb, as in "Returns the loss." No text
leads to the docstring of a module, which the site does not show.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = ("*.md", "*.py", "Makefile")

_WORDS = re.compile(
    r"\b(?:likewise|beside|stands|anew|alike|any more|goes on|(?:is|are) (?:said|told)|of which"
    r"|(?<!there )(?:is|are) no(?! longer)|module(?:'s)? docstring)\b",
    re.IGNORECASE,
)
_BRITISH = re.compile(
    r"\b(?:(?:behavi|col|fav|flav|hon|neighb)our\w*|(?:cent|met)re[ds]?|centring|grey"
    r"|(?:labell|modell|signall)(?:ed|ing)|(?:mis)?spelt|learnt|judgement|artefacts?|licence"
    r"|defence|analys(?:e|ed|ing)|(?:categor|custom|emphas|general|initial|maxim|minim|normal"
    r"|optim|organ|parallel|penal|quant|real|recogn|regular|serial|special|standard|summar"
    r"|synchron|token|util|vector|visual)is(?:e[drs]?|ers|ing|ations?))\b",
    re.IGNORECASE,
)
_OPENINGS = re.compile(r"(?:What|Who|Whoever|Whose|Which|How|Where|When|Whether|That|All)\b")
_VERB = re.compile(r"`{0,2}(?!This\b|Is\b|Its\b|Has\b|As\b|Axes\b|Classes\b)[A-Z][a-z-]+s\b")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def check(path: str, text: str) -> Iterator[str]:
    """Yields a line for each place of a file that breaks a rule."""
    if path.endswith(".py"):
        prose = [*_comments(text), *_strings(ast.parse(text))]
        if path.startswith("weft/"):
            yield from (f"{path}:{line}: {found}" for line, found in _openings(ast.parse(text)))
    else:
        prose = list(enumerate(text.splitlines(), 1))
    for line, words in prose:
        sentence = " ".join(words.split())
        for found in _WORDS.findall(sentence):
            yield f"{path}:{line}: {found!r}"
        if path.startswith("tests/"):
            continue  # no user reads them, and some misspell on purpose
        for found in _BRITISH.findall(sentence):
            yield f"{path}:{line}: {found!r} is British, and the spelling here is American"


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yields the comments, those on consecutive lines as one."""
    last, lines = -1, []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != last + 1:
            yield last, " ".join(lines)
            lines = []
        last = token.start[0]
        lines.append(token.string.lstrip("# "))
    if lines:
        yield last, " ".join(lines)


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _openings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the first words of docstrings that begin neither with a noun nor with a verb."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | _Function):
            continue
        doc = ast.get_docstring(node)
        if not doc:
            continue
        first, line = doc.split(maxsplit=1)[0], node.body[0].lineno
        if _OPENINGS.match(first):
            yield line, f"a docstring begins with {first!r}; use a verb or a noun"
        elif isinstance(node, _Function) and not _is_property(node) and not _VERB.match(first):
            yield line, f"the docstring of {node.name!r} begins with {first!r}, which is not a verb"


def _is_property(node: _Function) -> bool:
    """Returns whether a function is read like an attribute, and so described by a noun."""
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def main() -> int:
    command = ["git", "ls-files", "--", *PATHS]
    files = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, encoding="utf-8"
    ).stdout
    found = [
        line
        for path in files.split()
        if not path.startswith("tests/house/") and (ROOT / path).exists()
        for line in check(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
