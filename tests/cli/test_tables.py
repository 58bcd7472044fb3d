import pytest

from weft.cli.tables import count_text, layout_text, shape_text, table_console, tree_table


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (999, "999"), (1500, "1.5k"), (3e6, "3.0M"), (2e15, "2.0P")]
)
def test_large_numbers_have_units(count, text):
    assert count_text(count) == text


def test_shapes_and_layouts():
    assert shape_text(()) == "()"
    assert layout_text(None) == ""
    assert layout_text(["data", None]) == "(data, -)"


def test_a_pipe_gets_columns_that_can_be_cut(capsys):
    table = tree_table("name", ["shape", "bytes"], numbers=["bytes"])
    table.add_row("  weight", "(2, 3)", "24")
    table.add_row("  bias", "(3)", "9000")
    console = table_console()
    console.print(table)
    head, first, second = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert head.split() == ["name", "shape", "bytes"]
    assert first.startswith("  weight") and first.endswith("24")
    assert len(first) == len(second) == len(head)
