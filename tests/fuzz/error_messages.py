"""Which exceptions do not help a user: those from inside of a message, and internal ones.

A message is made by the expression of a `raise` statement, by the statements before it in its
block, by the call of a warning, and by functions whose names say that they make errors.
"""

import ast
import functools
import itertools
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import weft

SOURCE = Path(weft.__file__).parent
# Functions that make errors or parts of them; those of the second pattern are losses, or raise.
_BUILDER = re.compile(
    r"_error$|_hint$|^_describe|^_?(hint|advice|explain|conflict|did_you|similar)"
)
_NOT_BUILDER = re.compile(r"(squared|absolute|huber|mean)_error$|^_?(print|read|on)_|^explain_call")
_WARNING = re.compile(r"(^|\.)warn(_user|_deprecated|ings\.warn)?$|^_?log(ger|ging)?\.\w+$")
# Names that a user cannot know.
_PRIVATE = re.compile(r"has no attribute '(_[a-z]\w*)'|\b(_[a-z]\w*)\(\) (?:missing|takes|got)")
_RECURSION = 100  # frames

Span = tuple[int, int, int, int]


def fault(error: BaseException) -> str | None:
    """Returns why an exception does not help a user, with the line of Weft, or None."""
    for each in _shown_with(error):
        frames = traceback.extract_tb(each.__traceback__)
        ours = [frame for frame in frames if SOURCE in Path(frame.filename).parents]
        # What the user called may itself make messages.
        called = itertools.takewhile(_is_builder, ours)
        for frame in ours[len([*called]) :]:
            if _makes_message(frame) and not _is_known(each):
                return f"{_shown(each)} from inside of a message, {_place(frame)}"
        if ours and (len(ours) > _RECURSION or _is_internal(each, frames[-1])):
            return f"internal {_shown(each)}, {_place(ours[-1])}"
    return None


def _shown_with(error: BaseException | None) -> list[BaseException]:
    """Returns an error and those that Python shows with it."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        handled = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or handled
    return chain


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}({str(error)[:200]!r})"


def _place(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).relative_to(SOURCE)}:{frame.lineno} ({frame.name})"


def _is_internal(error: BaseException, last: traceback.FrameSummary) -> bool:
    """Returns whether an error of Python's own tells of a mistake in Weft."""
    if isinstance(error, RecursionError):
        return True
    if SOURCE not in Path(last.filename).parents:
        return False
    if isinstance(error, AssertionError):
        return not str(error)
    if isinstance(error, (AttributeError, TypeError)):
        private = _PRIVATE.search(str(error))
        # Else it is a name of a library whose function, not in Python, was called.
        return private is not None and (private[1] or private[2]) in _source(last.filename)
    # JAX raises a NameError for an axis that is not mapped.
    return isinstance(error, NameError) and "unbound axis" not in str(error)


@functools.cache
def _source(filename: str) -> str:
    return Path(filename).read_text(encoding="utf-8")


def _is_known(error: BaseException) -> bool:
    """Returns whether JAX says of an array in the message what is wrong with it."""
    return "Array has been deleted" in str(error)


def _is_builder(frame: traceback.FrameSummary) -> bool:
    return bool(_BUILDER.search(frame.name)) and not _NOT_BUILDER.search(frame.name)


def _makes_message(frame: traceback.FrameSummary) -> bool:
    """Returns whether what a frame did when it raised was to make a message."""
    raises, others = _statements(frame.filename)
    if (frame.lineno, frame.end_lineno, frame.colno, frame.end_colno) in raises:
        return False
    if _is_builder(frame):
        return True
    lines = [(first, last) for first, last, _, _ in (*raises, *others)]
    return any(first <= (frame.lineno or 0) <= last for first, last in lines)


@functools.cache
def _statements(filename: str) -> tuple[frozenset[Span], frozenset[Span]]:
    """Returns where a file has `raise` statements, and what else makes only messages."""
    raises, others = [], []
    for node in ast.walk(ast.parse(_source(filename))):
        if isinstance(node, ast.Raise):
            raises.append(node)
        elif isinstance(node, ast.Call) and _WARNING.search(ast.unparse(node.func)):
            others.append(node)
        elif isinstance(node, (ast.If, ast.ExceptHandler)):
            others += _before_raise(node.body)
    return frozenset(map(_span, raises)), frozenset(map(_span, others))


def _before_raise(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a block that are there for the `raise` at its end."""
    if isinstance(body[-1], ast.Raise):
        for statement in body[:-1]:
            leaves = (ast.Return, ast.Yield, ast.Continue, ast.Break)
            if any(isinstance(node, leaves) for node in ast.walk(statement)):
                return
            yield statement


def _span(node: ast.stmt | ast.expr) -> Span:
    columns = node.col_offset, node.end_col_offset or node.col_offset
    return node.lineno, node.end_lineno or node.lineno, *columns
