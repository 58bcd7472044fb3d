"""HTML page of a report, with embedded style sheet and light and dark color schemes."""

import html


def page(title: str, body: str) -> str:
    """Returns a self-contained page from a title in plain text and a body in HTML."""
    return _PAGE.format(title=html.escape(title), style=_STYLE, body=body)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root {
  --paper: #fcfcfb; --ink: #1c1d1f; --quiet: #63666b; --line: #e2e3e4; --panel: #f3f3f1;
  --c0: #2a6f97; --c1: #c2571a; --c2: #4f7f3a; --c3: #7d4f9e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16181b; --ink: #e4e5e7; --quiet: #9a9ea5; --line: #2f3338; --panel: #1e2125;
    --c0: #6fb3d9; --c1: #f0955c; --c2: #94c77c; --c3: #c39be0;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif;
}
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
header p { margin: 0; color: var(--quiet); }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 0 0 .75rem; }
h3 { font-size: .95rem; margin: 1.5rem 0 .25rem; }
section, details { margin-top: 2.25rem; }
details { border-top: 1px solid var(--line); padding-top: .9rem; }
details + details { margin-top: 1rem; }
summary { cursor: pointer; }
summary h2 { display: inline; }
details[open] > summary { margin-bottom: 1rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--quiet); font-variant-numeric: tabular-nums; }
svg path { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .level { stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 5 4; }
svg .faint { stroke-width: 1; opacity: .28; }
path.series-0 { stroke: var(--c0); } .series-0::before { background: var(--c0); }
path.series-1 { stroke: var(--c1); } .series-1::before { background: var(--c1); }
path.series-2 { stroke: var(--c2); } .series-2::before { background: var(--c2); }
path.series-3 { stroke: var(--c3); } .series-3::before { background: var(--c3); }
circle.series-0 { fill: var(--c0); } circle.series-1 { fill: var(--c1); }
circle.series-2 { fill: var(--c2); } circle.series-3 { fill: var(--c3); }
.legend {
  display: flex; gap: 1.25rem; list-style: none; margin: 0 0 .5rem; padding: 0; color: var(--quiet);
}
.legend li::before {
  content: ""; display: inline-block; width: 1.1rem; height: 3px; margin-right: .45rem;
  vertical-align: middle; border-radius: 2px;
}
.charts {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1.5rem;
}
figure { margin: 0 0 1rem; min-width: 0; }
figcaption {
  color: var(--quiet); font-size: .85rem; margin-bottom: .25rem; overflow-wrap: anywhere;
}
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin-top: 1rem; font-variant-numeric: tabular-nums; }
th, td {
  text-align: left; white-space: nowrap; padding: .25rem 1.5rem .25rem 0;
  border-bottom: 1px solid var(--line);
}
th { font-weight: 500; color: var(--quiet); }
pre {
  margin: 0; padding: .9rem 1rem; overflow-x: auto; background: var(--panel); border-radius: 6px;
  font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
}
pre b { color: var(--c1); font-weight: 600; }
"""
