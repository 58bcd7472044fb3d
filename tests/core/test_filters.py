import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.filters import DenyList, first_match, in_filter

names = st.sampled_from(["params", "cache", "batch_stats"])
filters = st.recursive(
    st.one_of(st.booleans(), names, st.frozensets(names)), lambda inner: inner.map(DenyList)
)


@given(filters, names)
def test_a_deny_list_matches_what_its_filter_does_not(where, name):
    assert in_filter(DenyList(where), name) is not in_filter(where, name)


@given(st.lists(filters, max_size=4), names)
def test_the_first_filter_that_matches_counts(wheres, name):
    at = first_match(wheres, name)
    matches = [in_filter(where, name) for where in wheres]
    assert at == (matches.index(True) if any(matches) else None)


def test_what_is_no_filter_is_refused():
    with pytest.raises(TypeError, match="3 is no filter; expected True, False, a name"):
        in_filter(3, "params")
