"""Says where names in headings and tables may break, and that options of commands do not.

On a narrow screen a long name breaks after a dot, a slash or an underscore. MkDocs calls
`on_page_content` for each page; `style.css` has the class of options.
"""

import re

_PROGRAMS = re.compile(r"(<pre.*?</pre>)", re.DOTALL)
_HEADINGS_AND_CELLS = re.compile(r"<(h[1-6]|td)\b.*?</\1>", re.DOTALL)
_TAGS = re.compile(r"(<[^>]*>)")
_NAME = re.compile(r"[A-Za-z_]\w*(?:[./]\w+)+|[A-Za-z]+(?:_\w+)+")
_CODE = re.compile(r"<code>[^<]*</code>")
_OPTION = re.compile(r"(?<![\w-])--[\w-]+")


def on_page_content(html: str, **_: object) -> str:
    """Returns the page with the places where names may break, except in its programs."""
    parts = _PROGRAMS.split(html)
    parts[::2] = [
        _CODE.sub(_keep_options, _HEADINGS_AND_CELLS.sub(_break_names, part))
        for part in parts[::2]
    ]
    return "".join(parts)


def _break_names(element: re.Match[str]) -> str:
    """Returns a heading, or a cell of a table, whose names may break."""
    parts = _TAGS.split(element[0])
    parts[::2] = [_NAME.sub(_break_name, text) for text in parts[::2]]
    return "".join(parts)


def _break_name(name: re.Match[str]) -> str:
    return re.sub(
        r"(?<=\w)[./]|(?<=[^\W_])_+(?=[^\W_])", r"\g<0><wbr>", name[0]
    )


def _keep_options(code: re.Match[str]) -> str:
    return _OPTION.sub(r'<span class="option">\g<0></span>', code[0])
