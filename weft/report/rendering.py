"""Pages from templates: the files in `templates/`, which Jinja fills in.

A run's directory may come from a stranger, so every text is escaped as it is filled in. Python
computes the values that are shown; only templates contain HTML.
"""

import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2


def render(template: str, **values: object) -> str:
    """Returns the text of a file in `templates/`, with the values filled in.

    >>> render("page.html", title="<wide>").partition("<title>")[2].partition("</title>")[0]
    '&lt;wide&gt; · Weft'
    """
    return environment().get_template(template).render(values)


@functools.cache
def environment() -> "jinja2.Environment":
    """Returns the environment of the templates."""
    import jinja2  # the import takes longer than that of all displays

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
