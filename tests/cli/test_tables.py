"""Tables of the commands: columns that scripts can split, and short texts of values."""

import io

from rich.console import Console

from weft.report.display import table_console, tree_table


def test_tree_table_aligns_columns_without_margin():
    table = tree_table("parameter", ["shape", "bytes"], numbers=["bytes"])
    table.add_row("decoder", "", "1,024 B")
    table.add_row("  weight", "(8, 32)", "96 B")
    page = Console(file=io.StringIO(), width=120, highlight=False)
    page.print(table)
    assert page.file.getvalue().splitlines() == [
        "parameter  shape      bytes",
        "decoder             1,024 B",
        "  weight   (8, 32)     96 B",
    ]


def test_piped_output_has_tab_columns(capsys):
    table = tree_table("name", ["shape", "bytes"], numbers=["bytes"])
    table.add_row("  weight", "(2, 3)", "24")
    table.add_row("  bias", "(3)", "9000")
    console = table_console()
    console.print(table)
    head, first, second = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert head.split() == ["name", "shape", "bytes"]
    assert first.startswith("  weight") and first.endswith("24")
    assert len(first) == len(second) == len(head)
