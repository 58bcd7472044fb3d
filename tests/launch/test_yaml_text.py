import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.launch.jobset import to_yaml

yaml = pytest.importorskip("yaml")

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
lists_of_scalars = st.lists(scalars)
values = st.recursive(
    scalars | lists_of_scalars,
    lambda inner: (
        st.dictionaries(st.text(min_size=1, max_size=8), inner)
        | st.lists(st.dictionaries(st.sampled_from("abc"), inner, min_size=1))
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(st.sampled_from(["a", "on", "x.y/z"]), values, min_size=1))
def test_yaml_round_trips(value):
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize(
    "text", ["yes", "NO", "null", "1", "1.5", "a: b", "- a", "#", "", "~", "é"]
)
def test_strings_stay_strings(text):
    assert yaml.safe_load(to_yaml({"value": text, "list": [text]})) == {
        "value": text,
        "list": [text],
    }
