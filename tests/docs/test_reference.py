"""The reference shows signatures, fields and members as a reader needs them, and links names."""

import importlib.util
import types

import pytest

from tests.pages import ROOT

griffe = pytest.importorskip("griffe")
pytest.importorskip("mkdocs")

spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
assert spec is not None and spec.loader is not None
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)

CODE = '''
"""A module that calls others."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Sequence as _Sequence
from typing import NamedTuple

from weft import names

_PathLike = str | os.PathLike[str]
_AXES = {}


class Kind(enum.Enum):
    """Kinds."""

    NONE = "none"
    SUM = "sum"
    _OTHER = "other"

    @property
    def text(self): ...


class Pair(NamedTuple):
    """Pair."""

    step: int
    params: dict | None = None


@dataclasses.dataclass
class Config:
    """Config."""

    table: dict = dataclasses.field(default_factory=lambda: names.TABLE)


class _Combined:
    def __init__(self, *filters: int): ...


class All(_Combined):
    """All of `filters`."""


class Summary:
    """Summary.

    Args:
        _value: the array.
    """

    def __init__(self, _value: int, scale: int): ...


def read(path: _PathLike, others: _Sequence[_PathLike]) -> "Pair":
    """Reads; see `Summary.__call__`.

    Raises:
        ReadError: if there is no file.
    """


def scan(f, length=1, _split=False, axes=None, *, _testing=None): ...


def defaults(a=names.make(init=_AXES, size=2), b={**_AXES}, c=names.TABLE): ...


TABLE = {errors.key: errors for errors in (1, 2)}
'''


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    files = {
        "__init__.py": "",
        "errors.py": 'class ReadError(Exception):\n    """Error."""',
        "names.py": "TABLE = {}\ndef make(**x): ...",
        "calls.py": CODE,
    }
    (folder / "weft").mkdir()
    for name, code in files.items():
        (folder / "weft" / name).write_text(code, encoding="utf-8")
    extensions = griffe.load_extensions("dataclasses", reference.Docstrings())
    with pytest.MonkeyPatch.context() as patch:
        # The tables of Weft's packages name what this package lacks.
        patch.setattr(reference, "packages", dict)
        patch.setattr(reference, "MODULES", ("weft.calls",))
        patch.setattr(reference, "GUIDES", {"weft.calls": ("Calls", "calls.md")})
        return griffe.load("weft.calls", search_paths=[folder], extensions=extensions)


def signature(function):
    parameters = [parameter for parameter in function.parameters if parameter.name != "self"]
    return {
        parameter.name: str(parameter.default) if parameter.default else None
        for parameter in parameters
    }


def test_named_tuple_has_its_fields_as_parameters(shown):
    assert signature(shown["Pair.__init__"]) == {"step": None, "params": "None"}


def test_enumeration_lists_its_members(shown):
    text = shown["Kind"].docstring.value
    assert "- `NONE`, with the value `'none'`\n- `SUM`, with the value `'sum'`" in text
    assert "OTHER" not in text and "text" not in text


def test_class_has_the_parameters_of_its_private_base(shown):
    assert [*signature(shown["All.__init__"])] == ["filters"]


def test_required_private_parameter_is_positional_and_without_underscore(shown):
    value, scale = [*shown["Summary.__init__"].parameters][1:]
    assert value.name == "value"
    assert value.kind is griffe.ParameterKind.positional_only
    assert scale.kind is griffe.ParameterKind.positional_or_keyword
    assert " value: the array." in shown["Summary"].docstring.value


def test_private_parameters_that_may_be_left_out_are_hidden(shown):
    scan = shown["scan"]
    assert [*signature(scan)] == ["f", "length", "axes"]
    assert scan.parameters["axes"].kind is griffe.ParameterKind.keyword_only


def test_private_names_of_annotations_are_replaced_by_what_they_stand_for(shown):
    read = shown["read"]
    path_like = "str | os.PathLike[str]"
    assert str(read.parameters["path"].annotation) == path_like
    assert str(read.parameters["others"].annotation) == f"Sequence[{path_like}]"
    sequence = read.parameters["others"].annotation.left
    assert sequence.reference_path == "collections.abc.Sequence"


def test_annotation_has_no_quotes(shown):
    assert isinstance(shown["read"].returns, griffe.ExprName)
    assert str(shown["read"].returns) == "Pair"


def test_defaults_name_nothing_private(shown):
    assert signature(shown["defaults"]) == {
        "a": "make(init=..., size=2)",
        "b": "...",
        "c": "TABLE",
    }
    assert signature(shown["Config.__init__"]) == {"table": "TABLE"}


def test_variable_of_a_comprehension_is_no_module(shown):
    assert str(shown["TABLE"].value) == "{errors.key: errors for errors in (1, 2)}"


def test_errors_that_other_modules_raise_are_linked(shown):
    raises = [x for x in shown["read"].docstring.parse("google") if x.kind.value == "raises"]
    assert raises[0].value[0].annotation.reference_path == "weft.errors.ReadError"
    assert "ReadError" not in [name for name, x in shown.members.items() if x.is_public]


def test_underscores_of_a_linked_name_are_no_emphasis(shown):
    link = r'<autoref identifier="weft.calls.Summary.__call__" optional>'
    assert rf"{link}<code>Summary.\_\_call\_\_</code></autoref>" in shown["read"].docstring.value


def test_guide_of_a_module_follows_its_text(shown):
    assert shown.docstring.value == (
        "A module that calls others.\n\nThe guide is [Calls](../calls.md)."
    )


def test_every_explained_name_has_a_text():
    sources = griffe.load("weft", search_paths=[ROOT])
    tables = {
        name: reference.names_of(path, sources) for name, path in reference.packages().items()
    }
    originals = [name.removeprefix("weft.") for name in reference.homes_of(tables)]
    aliases = [f"typing.{name}" for name, x in sources["typing"].members.items() if x.is_public]
    aliases.remove("typing.PartitionSpec")  # JAX's
    assert "typing.Tensor" in aliases
    assert [name for name in originals + aliases if sources[name].docstring is None] == []


def test_topic_without_names_ends_the_build():
    topic = reference.Topic("Checkpoints", "weft.x/checkpoints", ("x.checkpoints",))
    with pytest.raises(ValueError, match=r"weft\.x/checkpoints .* has no names"):
        reference._by_topic([], {}, [topic])


def test_module_that_a_package_passes_on_has_a_link():
    assert reference.page_of_module("weft.traverse_util") == "weft.traverse_util"
    arrays = "weft.functional/arrays-and-initializers"
    assert reference.page_of_module("weft.functional.arrays") == arrays
    with pytest.raises(LookupError, match=r"no page for weft\.cli"):
        reference.page_of_module("weft.cli")


def test_overviews_say_of_what():
    config = types.SimpleNamespace(nav=[{"Reference": []}])
    reference.on_config(config)
    entries = [page for entry in config.nav[0]["Reference"] for page in entry.values()]
    titles = {title for pages in entries if isinstance(pages, list) for x in pages for title in x}
    assert "Overview of weft.nnx" in titles and "Overview" not in titles
