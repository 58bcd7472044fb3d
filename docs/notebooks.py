"""Runs the tutorials as notebooks, each in an empty folder, and shows what they print and draw.

A tutorial is a page whose `python` and `bash` blocks are the cells of a notebook. MkDocs calls
`on_files` before it reads the pages: a cell that raises an error ends the build. What has been run
is kept in `build/notebooks` until the page or the sources of Weft change.
"""

import hashlib
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jupytext
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import (
    CoalesceStreamsPreprocessor,
    HighlightMagicsPreprocessor,
)
from traitlets.config import Config

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
RESULTS = ROOT / "build" / "notebooks"
# What a cell prints is a block of its own, of the class `output`.
TEMPLATE = """
{%- extends "markdown/index.md.j2" -%}
{% macro printed(text) %}
``` {.text .output}
{{ text | strip_ansi | trim("\\n") }}
```
{% endmacro %}
{%- block stream %}{{ printed(output.text) }}{% endblock stream -%}
{%- block data_text %}{{ printed(output.data["text/plain"]) }}{% endblock data_text -%}
{%- block data_png %}
![Picture drawn by the cell above]({{ output.metadata.filenames["image/png"] | path2url }})
{% endblock data_png -%}
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces each tutorial by its results, with its pictures and the notebook next to it."""
    pages = [
        file
        for file in files.documentation_pages()
        if file.src_uri.startswith("tutorials/")
        and not file.src_uri.endswith("/index.md")
    ]
    # Two at a time: XLA compiles on one core each, and the steps are small.
    with ThreadPoolExecutor(2) as pool:
        notebooks = list(
            pool.map(lambda page: executed(page.content_string), pages)
        )
    for page, notebook in zip(pages, notebooks, strict=True):
        text, pictures = shown(notebook, Path(page.src_uri).stem)
        uri = page.src_uri.removesuffix(".md")
        files.remove(page)
        files.append(File.generated(config, page.src_uri, content=text))
        files.append(
            File.generated(
                config, f"{uri}.ipynb", content=nbformat.writes(notebook)
            )
        )
        for name, data in pictures.items():
            files.append(
                File.generated(config, f"tutorials/{name}", content=data)
            )
    return files


def executed(page: str) -> nbformat.NotebookNode:
    """Returns a page as a notebook with its results.

    Raises `nbclient.exceptions.CellExecutionError` if a cell does.
    """
    sources = sorted((ROOT / "weft").rglob("*.py"))
    digest = hashlib.sha256(
        page.encode() + b"".join(path.read_bytes() for path in sources)
    )
    result = RESULTS / f"{digest.hexdigest()}.ipynb"
    if result.exists():
        return nbformat.read(result, as_version=4)
    notebook = jupytext.reads(page, fmt="md")
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "tutorial")
        folder.mkdir()
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": home,
            # The lines of a page have room for as many characters.
            "COLUMNS": "100",
            "JUPYTER_COLUMNS": "100",
            "MATPLOTLIBRC": str(TUTORIALS / "matplotlibrc"),
        }
        client = NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            config=Config(
                KernelManager={"transport": "ipc", "ip": f"{home}/kernel"}
            ),
        )
        client.execute(env=environment)
    RESULTS.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, result)
    return notebook


def shown(
    notebook: nbformat.NotebookNode, name: str
) -> tuple[str, dict[str, bytes]]:
    """Returns the text of a tutorial's page, and its pictures by file name."""
    joined = CoalesceStreamsPreprocessor(enabled=True)
    magics = HighlightMagicsPreprocessor(enabled=True)
    exporter = MarkdownExporter(
        preprocessors=[joined, magics], raw_template=TEMPLATE
    )
    text, resources = exporter.from_notebook_node(
        notebook, {"unique_key": name, "output_files_dir": f"{name}_files"}
    )
    text = text.replace("```bash\n%%bash\n", "```bash\n")
    title, rest = re.split(r"(?<=\n)(?=\n)", text.lstrip(), maxsplit=1)
    text = f"{title}\n[Download this page as a notebook]({name}.ipynb)\n{rest}"
    return text, resources["outputs"]
