"""Gives each command of the site a block of its own, whose copy button copies what runs.

MkDocs calls `on_page_markdown` for each page. `style.css` keeps prompts and output out of copies.
"""

import re

_BLOCK = re.compile(
    r"^(?P<indent> *)```console\n(?P<lines>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Returns the page with a `console` block for each command."""
    return _BLOCK.sub(_split, markdown)


def _split(block: re.Match[str]) -> str:
    indent = block["indent"]
    commands: list[str] = []
    for line in block["lines"].splitlines(keepends=True):
        is_command = line.startswith(f"{indent}$ ")
        if is_command or not commands:
            commands.append("")
        commands[-1] += line
    blocks = [
        f"{indent}```console\n{command}{indent}```" for command in commands
    ]
    return "\n\n".join(blocks)
