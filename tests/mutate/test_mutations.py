import pytest

from tests.mutate.__main__ import ROOT, Suite, names_around
from tests.mutate.mutations import Mutation, edits, is_other_program


def mutations(path: str, text: str) -> list[Mutation]:
    return list(filter(is_other_program, edits(path, text)))


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
        ("x = y[1000]", ["x = y[2000]"]),
        ("x = jnp.minimum(a, b)", []),
        ("x = zip(a, strict=True)", []),
        ("assert x < y", []),
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


def test_diff_shows_the_changed_line():
    (mutation,) = mutations("weft/x.py", "import y\n\nx = y.a[0]\n")
    assert mutation.line == 3
    assert mutation.diff().endswith("-x = y.a[0]\n+x = y.a[1]")


@pytest.fixture(scope="module")
def test_files():
    return Suite(ROOT)


def test_nearest_tests_of_a_file(test_files):
    found = test_files.nearest("weft/compat/flax/traverse_util.py")
    assert found[:2] == [
        "weft/compat/flax/traverse_util.py",
        "tests/compat/flax/test_traverse_util.py",
    ]
    assert all("tests/linen" in test for test in test_files.nearest("weft/linen/summary.py")[1:])


def test_other_tests_are_ordered_by_mention_of_target(test_files):
    text = "class GRUCell:\n    x = y < z\n\n\ndef _private(): ...\n"
    (mutation,) = mutations("weft/linen/recurrent.py", text)
    others = test_files.others(mutation)
    naming = ["GRUCell" in (ROOT / test).read_text("utf-8") for test in others]
    assert naming == sorted(naming, reverse=True)
    assert "tests/parity/test_linen_recurrent.py" in others[: naming.index(False)]
    assert "tests/linen/test_conv.py" in others[naming.index(False) :]
    assert not set(others) & set(test_files.nearest(mutation.path))


def test_names_around_a_mutation_include_callers():
    text = "class A:\n    def __call__(self): return _b()\n\ndef _b():\n    return 3 + 4\n"
    (mutation,) = (m for m in mutations("weft/x.py", text) if "3 - 4" in m.mutated)
    assert names_around(mutation) == ["_b", "A"]
