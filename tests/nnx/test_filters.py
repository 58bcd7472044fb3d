import pytest

from weft import nnx
from weft.errors import StateFilterError
from weft.nnx.filters import to_predicate

STATE = nnx.State(
    {
        "a": {"kernel": nnx.Param(1, tag="head"), "bias": nnx.Param(2)},
        "b": {"mean": nnx.BatchStat(3), "n": 4},
    }
)


def paths(filter_like):
    return ["/".join(p) for p in nnx.to_flat_state(nnx.filter_state(STATE, filter_like)).paths]


@pytest.mark.parametrize(
    ("filter_like", "expected"),
    [
        (nnx.Param, ["a/bias", "a/kernel"]),
        (int, ["b/n"]),
        ("head", ["a/kernel"]),
        (nnx.WithTag("head"), ["a/kernel"]),
        (nnx.OfType(nnx.Variable), ["a/bias", "a/kernel", "b/mean"]),
        (nnx.PathContains("kernel"), ["a/kernel"]),
        (nnx.PathContains("ern", exact=False), ["a/kernel"]),
        (nnx.PathIn(frozenset([("b", "n")])), ["b/n"]),
        (nnx.Not(nnx.Param), ["b/mean", "b/n"]),
        (nnx.All(nnx.Param, nnx.Not("head")), ["a/bias"]),
        (nnx.Any("head", nnx.BatchStat), ["a/kernel", "b/mean"]),
        (["head", nnx.BatchStat], ["a/kernel", "b/mean"]),
        (("head", nnx.BatchStat), ["a/kernel", "b/mean"]),
        (lambda path, x: x == 4, ["b/n"]),
        (..., ["a/bias", "a/kernel", "b/mean", "b/n"]),
        (True, ["a/bias", "a/kernel", "b/mean", "b/n"]),
        (nnx.Everything(), ["a/bias", "a/kernel", "b/mean", "b/n"]),
        (None, []),
        (False, []),
        (nnx.Nothing(), []),
    ],
    ids=lambda value: getattr(value, "__name__", None) or repr(value),
)
def test_matches(filter_like, expected):
    assert paths(filter_like) == expected


def test_filters_are_compared_by_value():
    for make in (
        nnx.Everything,
        nnx.Nothing,
        lambda: nnx.Not("a"),
        lambda: nnx.All("a", nnx.Param),
        lambda: nnx.Any("a", ...),
        lambda: nnx.PathContains("a"),
    ):
        assert make() == make() and hash(make()) == hash(make()) and make() != nnx.Not("b")
    assert repr(nnx.Not(...)) == "Not(Everything())"
    assert nnx.All("a") != nnx.Any("a")


def test_errors_of_filters():
    with pytest.raises(StateFilterError, match=r"3 is not a filter; a filter is a type of"):
        to_predicate(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(StateFilterError, match=r"Ellipsis matches everything, but .* put it last"):
        nnx.state(nnx.List([]), ..., nnx.Param)
