"""Tables of the commands: columns that scripts can split, and short texts of values."""

import io
import subprocess

from rich.console import Console

from weft.report.display import LineDisplay, print_table, print_words, table_console, tree_table


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


def test_lines_of_a_terminal_end_between_words():
    text = "step 1,000  held out: loss 0.1234, accuracy 0.9512, perplexity 12,345"
    for is_terminal, lines in (
        (True, ["step 1,000  held out: loss", "  0.1234, accuracy 0.9512,", "  perplexity 12,345"]),
        (False, [text]),
    ):
        console = Console(file=io.StringIO(), width=26, force_terminal=is_terminal)
        print_words(console, text)
        assert console.file.getvalue().splitlines() == lines


def test_narrow_terminal_has_fewer_columns():
    for width, header in (
        (40, ["name", "class", "shape", "layout"]),
        (30, ["name", "shape", "layout"]),
        (20, ["name", "shape"]),
    ):
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        table = tree_table("name", ["class", "shape", "layout"], numbers=["shape"])
        table.add_row("kernel", "Einsum", "(1024, 64)", "(-,model)")
        print_table(console, table, less_important=["class", "layout"])
        names, cells = console.file.getvalue().splitlines()
        assert names.split() == header
        assert "(1024, 64)" in cells


def test_commands_can_be_copied_from_a_narrow_terminal():
    words = ["weft", "train", "lm-tiny", f"dir={'long' * 9}", "'a=1 2'", "max_step=1200"]
    lines = {}
    for width in (40, 400):
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        LineDisplay(console, "run").print_command(words)
        lines[width] = console.file.getvalue().splitlines()
    assert lines[400] == [" ".join(words)]
    first, long, last = lines[40]
    assert [first, last] == ["weft train lm-tiny \\", "    'a=1 2' max_step=1200"]
    assert long == f"    {words[3]} \\"
    shown = subprocess.run(
        ["bash", "-c", "weft() { printf '%s;' \"$@\"; }\n" + "\n".join(lines[40])],
        capture_output=True,
        encoding="utf-8",
    )
    assert shown.stdout == f"train;lm-tiny;{words[3]};a=1 2;max_step=1200;"
