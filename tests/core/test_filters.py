import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.filters import (
    DenyList,
    canonical,
    filter_to_set,
    from_canonical,
    group_collections,
    in_filter,
    intersect_filters,
    is_filter_empty,
    subtract_filters,
    union_filters,
)
from weft.errors import InvalidFilterError

known = ["params", "cache", "batch_stats"]
names = st.one_of(st.sampled_from(known), st.text("abc", max_size=2))
filters = st.recursive(
    st.one_of(
        st.booleans(), names, st.frozensets(names), st.lists(names, max_size=3), st.sets(names)
    ),
    lambda inner: inner.map(DenyList),
    max_leaves=3,
)
few = settings(deadline=None, max_examples=25)


@given(filters, filters, st.lists(names, min_size=4))
@few
def test_set_operations_agree_with_in_filter(a, b, some):
    for name in [*known, "another", *some]:
        in_a, in_b = in_filter(a, name), in_filter(b, name)
        assert in_filter(union_filters(a, b), name) == (in_a or in_b)
        assert in_filter(intersect_filters(a, b), name) == (in_a and in_b)
        assert in_filter(subtract_filters(a, b), name) == (in_a and not in_b)


@given(filters, filters)
@few
def test_equal_filters_have_one_canonical_form(a, b):
    parts = canonical(a)
    assert hash(parts) == hash(canonical(from_canonical(parts)))
    assert canonical(from_canonical(parts)) == parts
    assert canonical(union_filters(a, b)) == canonical(union_filters(b, a))
    assert canonical(DenyList(DenyList(a))) == parts


@given(filters)
@few
def test_empty_filters_are_detected(where):
    assert is_filter_empty(subtract_filters(where, where))
    assert is_filter_empty(where) == (canonical(where) == canonical(False))
    assert not is_filter_empty(union_filters(where, DenyList(where)))


@given(st.lists(filters, max_size=4), names)
@few
def test_first_matching_filter_wins(wheres, name):
    groups = group_collections({name: 1}, wheres)
    matches = [in_filter(where, name) for where in wheres]
    first = [matches.index(True)] if any(matches) else []
    assert [i for i, group in enumerate(groups) if group] == first


def test_non_filter_is_rejected():
    message = "3 cannot be used as a filter here; expected True, False, a name, a collection of"
    for use in (
        lambda: in_filter(3, "params"),
        lambda: filter_to_set(3),
        lambda: union_filters("params", 3),
        lambda: intersect_filters(DenyList(3), True),
        lambda: subtract_filters(3, "params"),
        lambda: is_filter_empty(DenyList(3)),
    ):
        with pytest.raises(InvalidFilterError, match=re.escape(message)):
            use()
    with pytest.raises(TypeError, match="None cannot be used"):
        union_filters(None, True)


def test_nested_filters_are_rejected():
    with pytest.raises(
        InvalidFilterError, match=r"\[\['a'\]\] cannot .*: \['a'\] in it is not a name"
    ):
        canonical([["a"]])
    with pytest.raises(InvalidFilterError, match=r"DenyList\(deny='b'\) in it is not a name"):
        union_filters(("a", DenyList("b")), "c")


@pytest.mark.parametrize("where", [True, DenyList("params")])
def test_infinite_filter_has_no_set(where):
    with pytest.raises(InvalidFilterError, match="it matches names without end, so they cannot"):
        filter_to_set(where)
