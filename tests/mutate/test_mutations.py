import pytest

from tests.mutate.__main__ import ROOT, nearest_tests
from tests.mutate.mutations import mutations


def mutants(text: str) -> list[str]:
    return [mutation.mutated for mutation in mutations("weft/x.py", text)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = a is not None", ["x = a is None"]),
        ("x = (a) not in (b)", ["x = (a) in (b)"]),
        ("x = a and b or c", ["x = a or b or c", "x = a and b and c"]),
        ("x = 'é' + y", ["x = 'é' - y"]),
        ("x = y[2]", ["x = y[3]"]),
        ("x = not y", ["x = y"]),
        ("f(a, b)", ["pass", "f(b, a)"]),
        ("x = f(a=y, b=z)", ["x = f( b=z)", "x = f(a=y, )"]),
        ("x.y = z", ["pass"]),
        ("x: list[2] = y", []),
        ("def f(a: g(2) = 3): ...", ["def f(a: g(2) = 4): ..."]),
        ("raise ValueError(f'{x + 1}')", ["pass"]),
        ("def f():\n    return x", ["def f():\n    return None"]),
        ("if x:\n    y", ["if not (x):\n    y"]),
        ("if TYPE_CHECKING:\n    f()", ["if not (TYPE_CHECKING):\n    f()"]),
        ("@overload\ndef f(x=1): ...", []),
    ],
)
def test_mutations_of_a_program(before, after):
    assert sorted(mutants(before)) == sorted(after)


def test_a_diff_shows_the_changed_line():
    (mutation,) = mutations("weft/x.py", "import y\n\nx = y.a[0]\n")
    assert mutation.line == 3
    assert mutation.diff().endswith("-x = y.a[0]\n+x = y.a[1]")


def test_the_tests_of_a_file():
    found = nearest_tests("weft/traverse_util.py", ROOT)
    assert found[:2] == ["weft/traverse_util.py", "tests/test_traverse_util.py"]
    assert all("tests/linen" in test for test in nearest_tests("weft/linen/summary.py", ROOT)[1:])
