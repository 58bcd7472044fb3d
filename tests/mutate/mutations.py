"""Small changes of a source file; a test should notice each."""

import ast
import dataclasses
import difflib
import re
from collections.abc import Iterator

_SWAPPED_PAIRS = (
    ("<", "<="), (">", ">="), ("==", "!="), ("is", "is not"), ("in", "not in"), ("and", "or"),
    ("+", "-"), ("*", "/"), ("&", "|"), ("<<", ">>"),
)  # fmt: skip
_SWAPPED = {a: b for pair in _SWAPPED_PAIRS for a, b in (pair, pair[::-1])}
_SWAPPED |= {"//": "*", "%": "*", "**": "*"}
_SIGNS: dict[type[ast.AST], str] = {
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="},
    **{ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"},
    **{ast.And: "and", ast.Or: "or", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"},
    **{ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.BitAnd: "&", ast.BitOr: "|"},
    **{ast.LShift: "<<", ast.RShift: ">>"},
}
_SYMMETRIC = {
    "min", "max", "minimum", "maximum", "add", "multiply", "gcd", "result_type", "values_equal",
}  # fmt: skip
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Mutation:
    """Replacement of one piece of a file's text, given by its offsets."""

    path: str
    text: str
    start: int
    end: int
    new: str

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.start) + 1

    @property
    def mutated(self) -> str:
        return self.text[: self.start] + self.new + self.text[self.end :]

    def diff(self) -> str:
        before, after = self.text.splitlines(), self.mutated.splitlines()
        lines = difflib.unified_diff(before, after, self.path, self.path, lineterm="", n=2)
        return "\n".join(lines)


def edits(path: str, text: str) -> list[Mutation]:
    """Returns the mutations of a file, and edits that are not Python or the same program."""
    return [Mutation(path, text, *edit) for edit in sorted(set(_Edits(text).of(ast.parse(text))))]


def is_other_program(mutation: Mutation) -> bool:
    try:
        return ast.dump(ast.parse(mutation.mutated)) != ast.dump(ast.parse(mutation.text))
    except SyntaxError:
        return False


class _Edits:
    """Edits of a text, each as two offsets and the text between them."""

    def __init__(self, text: str):
        self._text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def _offset(self, line: int, column: int) -> int:
        start = self._lines[line - 1].encode()[:column].decode()  # columns count bytes
        return self._starts[line - 1] + len(start)

    def _span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        end = self._offset(node.end_lineno, node.end_col_offset)
        return self._offset(node.lineno, node.col_offset), end

    def of(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        yield from self._of_node(node)
        for child in _mutable_children(node):
            yield from self.of(child)

    def _of_node(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=right):
                yield from self._with_other_operators([left, *right], ops)
            case ast.BoolOp(op=op, values=values):
                yield from self._with_other_operators(values, [op] * (len(values) - 1))
            case ast.BinOp(left=left, op=op, right=right):
                yield from self._with_other_operators([left, right], [op])
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield self._span(node)[0], self._span(operand)[0], ""
            case ast.Constant(value=bool(value)):
                yield *self._span(node), str(not value)
            case ast.Constant(value=int() | float() as value):
                yield *self._span(node), repr(value + 1 if value < 1000 else 2 * value)
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                start, end = self._span(test)
                yield start, end, f"not ({self._text[start:end]})"
            case ast.Return(value=ast.expr() as value):
                yield *self._span(value), "None"
            case ast.Break():
                yield *self._span(node), "continue"
            case ast.Continue():
                yield *self._span(node), "break"
            case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()) | ast.Raise():
                yield *self._span(node), "pass"
            case ast.AugAssign() | ast.Delete():
                yield *self._span(node), "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield *self._span(node), "pass"
            case ast.Call():
                yield from self._with_other_arguments(node)

    def _with_other_operators(
        self, operands: list[ast.expr], ops: list[ast.cmpop] | list[ast.boolop] | list[ast.operator]
    ) -> Iterator[tuple[int, int, str]]:
        for left, op, right in zip(operands, ops, operands[1:], strict=False):
            sign = _SIGNS.get(type(op))
            start, end = self._span(left)[1], self._span(right)[0]
            if sign is not None and (at := self._text.find(sign, start, end)) >= 0:
                yield at, at + len(sign), _SWAPPED[sign]

    def _with_other_arguments(self, call: ast.Call) -> Iterator[tuple[int, int, str]]:
        function = ast.unparse(call.func)
        is_symmetric = function.rpartition(".")[2] in _SYMMETRIC
        has_two = len(call.args) > 1 and not any(isinstance(x, ast.Starred) for x in call.args[:2])
        if has_two and not is_symmetric:
            (start, a), (b, end) = map(self._span, call.args[:2])
            yield start, end, self._text[b:end] + self._text[a:b] + self._text[start:a]
        for keyword in call.keywords:
            if function == "zip":  # strict=True only checks an invariant
                continue
            start, end = self._span(keyword)
            comma = re.compile(r"\s*,").match(self._text, end)
            yield start, comma.end() if comma else end, ""


def _mutable_children(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the parts of a node, but not types, messages, and what always holds."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        yield from node.orelse
        return
    if isinstance(node, _Function):
        if any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list):
            return
        yield from (node.args, *node.body)
    elif isinstance(node, ast.AnnAssign):
        yield from filter(None, [node.value])
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "zip":
        yield from node.args
    elif not isinstance(node, ast.arg):
        yield from ast.iter_child_nodes(node)
