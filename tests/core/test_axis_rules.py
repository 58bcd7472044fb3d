import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from weft.core.axis_rules import (
    checked_rules,
    composite_rules,
    get_logical_axis_rules,
    logical_axis_rules,
    set_logical_axis_rules,
)
from weft.errors import LogicalAxisError

RULES = (("embed", "data"), ("heads", ("data", "model")), ("kv", None), ("any", P.UNCONSTRAINED))


@pytest.fixture(autouse=True)
def rules_are_reset():
    with logical_axis_rules(()):
        yield


def test_rules_are_converted_to_tuples():
    assert checked_rules(RULES) == RULES
    assert checked_rules([["heads", ["data", "model"]]]) == (("heads", ("data", "model")),)
    assert checked_rules(None) == ()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"embed": "data"}, r"are a dict.*tuple\(rules.items\(\)\)"),
        ("embed", "are 'embed'; expected a sequence of pairs"),
        (3, "are 3; expected a sequence of pairs"),
        ([("embed",)], r"\('embed',\) is not a rule .* pair of its name"),
        ([("embed", "data", "model")], "is not a rule"),
        ([(None, "data")], "is not a rule"),
        (["ab"], "'ab' is not a rule"),
        ([("embed", 3)], "the rule for 'embed' gives it the mesh axes 3; expected a name"),
        ([("embed", ("data", None))], r"mesh axes \('data', None\); expected"),
        ([("embed", ("data", "data"))], "each may be there once"),
    ],
)
def test_malformed_rules(rules, message):
    with pytest.raises(LogicalAxisError, match=message):
        set_logical_axis_rules(rules)
    with pytest.raises(LogicalAxisError, match=message), logical_axis_rules(rules):
        pass
    assert get_logical_axis_rules() == ()


def test_rules_are_thread_local():
    seen = []

    def other():
        seen.append(get_logical_axis_rules())
        set_logical_axis_rules(RULES[:1])

    with logical_axis_rules(RULES):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert get_logical_axis_rules() == RULES
    assert seen == [()]


def test_other_rules_retrace_jitted_function():
    seen = []

    @jax.jit
    def f(x):
        seen.append(get_logical_axis_rules())
        return x

    f(jnp.ones(1))
    for _ in range(2):
        with logical_axis_rules([list(rule) for rule in RULES]):
            f(jnp.ones(1))
    f(jnp.ones(1))
    assert seen == [(), RULES]


def test_conflicting_rule_sets():
    with pytest.raises(LogicalAxisError, match="for the logical axis 'a': one gives it 'x', the"):
        composite_rules([("a", "x")], [("b", "x"), ("a", None)])
    with pytest.raises(LogicalAxisError, match="one gives it 'x' and then 'y', the other 'x'"):
        composite_rules([("a", "x"), ("a", "y")], [("a", "x")])
