import collections.abc
import enum
import math
from typing import Annotated, Any, Literal, NewType, Optional, Union

import pytest

from weft.config import REQUIRED, ConfigReferenceError, InstantiableConfig, Required
from weft.config.convert import NoConversion, convert
from weft.config.text_read import read_value


class Colour(enum.Enum):
    RED = "crimson"
    BLUE = 2


Metres = NewType("Metres", float)


def read(text):
    return read_value(text, source="")


GOOD = [
    ("3", int, 3),
    ("-3", int, -3),
    ("1_000", int, 1000),
    ("1e6", int, 1_000_000),
    ("0x10", int, 16),
    (" 3 ", int, 3),
    ("3e-4", float, 3e-4),
    ("3", float, 3.0),
    ("inf", float, math.inf),
    ("1+2j", complex, 1 + 2j),
    ("true", bool, True),
    ("False", bool, False),
    ("1", bool, True),
    ("no", bool, False),
    ("1e-3", str, "1e-3"),
    ("'a b'", str, "a b"),
    ("a=b", str, "a=b"),
    ("", str, ""),
    ("None", int | None, None),
    ("none", Optional[str], None),  # noqa: UP045 - both ways of writing are tested
    ("3", Union[int, str], 3),  # noqa: UP007
    ("three", int | str, "three"),
    ("3", float | int, 3),
    ("1", bool | int, 1),
    ("true", bool | int, True),
    ("3.5", int | float, 3.5),
    ("0.5", str | float | None, 0.5),
    ("REQUIRED", int, REQUIRED),
    ("3", Required[int], 3),
    ("a", Literal["a", "b"], "a"),
    ("2", Literal[1, 2], 2),
    ("'a'", Literal["a"], "a"),
    ("RED", Colour, Colour.RED),
    ("Colour.BLUE", Colour, Colour.BLUE),
    ("crimson", Colour, Colour.RED),
    ("1,2,3", tuple[int, ...], (1, 2, 3)),
    ("(1, 2)", tuple[int, int], (1, 2)),
    ("[1, 2,]", list[int], [1, 2]),
    ("data,model", collections.abc.Sequence[str], ("data", "model")),
    ("('data', 'model')", tuple[str, ...], ("data", "model")),
    ("", list[int], []),
    ("()", tuple[int, ...], ()),
    ("5", tuple[int, ...], (5,)),
    ("(1,2),(3,4)", list[tuple[int, int]], [(1, 2), (3, 4)]),
    ("[[1,2],[3]]", list[list[int]], [[1, 2], [3]]),
    ("1,x", tuple[int, str], (1, "x")),
    ("'a,b',c", list[str], ["a,b", "c"]),
    ("{1, 2}", set[int], {1, 2}),
    ("a,b", frozenset[str], frozenset("ab")),
    ("a: 1, b: 2", dict[str, int], {"a": 1, "b": 2}),
    ("{'a b': [1, 2]}", dict[str, list[int]], {"a b": [1, 2]}),
    ("{}", dict, {}),
    ("{a: 0.5, b: x}", dict, {"a": 0.5, "b": "x"}),
    ("4.5", Annotated[float, "note"], 4.5),
    ("4.5", Metres, 4.5),
    ("3", Any, 3),
    ("bfloat16", Any, "bfloat16"),
    ("[1, 'a']", Any, [1, "a"]),
    ("int", type, int),
    ("complex", collections.abc.Callable, complex),
]


def short(value):
    # The order of a set differs from process to process, and all must collect the same names.
    return str(sorted(value) if isinstance(value, set | frozenset) else value)[:30]


@pytest.mark.parametrize(("text", "hint", "value"), GOOD, ids=short)
def test_what_a_string_stands_for(text, hint, value):
    result = convert(text, hint, read)
    assert result == value
    assert type(result) is type(value)


BAD = [
    ("x", int),
    ("1.5", int),
    ("inf", int),
    ("x", float),
    ("", float),
    ("x", complex),
    ("maybe", bool),
    ("2", bool),
    ("x", None),
    ("x", int | None),
    ("c", Literal["a", "b"]),
    ("GREEN", Colour),
    ("1,x", list[int]),
    ("1,2,3", tuple[int, int]),
    ("a", dict[str, int]),
    ("a:b:c", dict[str, int]),
    ("a:x", dict[str, int]),
    ("3", collections.abc.Callable),
    ("3", InstantiableConfig),
]


@pytest.mark.parametrize(("text", "hint"), BAD, ids=short)
def test_what_it_does_not_stand_for(text, hint):
    with pytest.raises(NoConversion):
        convert(text, hint, read)


def test_where_no_type_is_declared_the_value_tells():
    assert convert("3", Any, read, like="text") == "3"
    assert convert("true", Any, read, like=False) is True
    assert convert("3", Any, read, like=None) == 3
    with pytest.raises(NoConversion):
        convert("3", Any, read, like=True)


def test_a_union_says_what_was_wrong():
    with pytest.raises(NoConversion) as error:
        convert("os.system", InstantiableConfig | None, read)
    assert "may not name 'os.system'" in str(error.value.cause)


def test_a_name_that_may_not_be_spoken_of():
    with pytest.raises(NoConversion) as error:
        convert("os.system", collections.abc.Callable, read)
    assert isinstance(error.value.cause, ConfigReferenceError)
    assert convert("os.system", str | collections.abc.Callable, read) == "os.system"
