"""Names in headings and tables break where a reader expects it, and options do not."""

import importlib.util

import pytest

from tests.pages import ROOT

spec = importlib.util.spec_from_file_location("wrapping", ROOT / "docs/wrapping.py")
assert spec is not None and spec.loader is not None
wrapping = importlib.util.module_from_spec(spec)
spec.loader.exec_module(wrapping)


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        (
            '<h2 id="weft.nnx.Rngs"><span>weft.nnx.Rngs</span></h2>',
            '<h2 id="weft.nnx.Rngs"><span>weft.<wbr>nnx.<wbr>Rngs</span></h2>',
        ),
        (
            "<td><code>attention/bias_of.py</code></td>",
            "<td><code>attention/<wbr>bias_<wbr>of.<wbr>py</code></td>",
        ),
        ("<h3>load_params</h3>", "<h3>load_<wbr>params</h3>"),
        ("<h3>__call__</h3>", "<h3>__call__</h3>"),
        ("<td>0.25</td><td>and so on. Then</td>", "<td>0.25</td><td>and so on. Then</td>"),
        ("<p><code>weft.nnx</code></p>", "<p><code>weft.nnx</code></p>"),
        (
            "<p><code>weft sample --top-k 5</code></p>",
            '<p><code>weft sample <span class="option">--top-k</span> 5</code></p>',
        ),
        ("<pre><code>weft --top-k</code></pre>", "<pre><code>weft --top-k</code></pre>"),
    ],
)
def test_page_says_where_names_break(html, expected):
    assert wrapping.on_page_content(html) == expected
