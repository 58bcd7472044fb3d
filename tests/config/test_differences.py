from weft.config import (
    ABSENT,
    Change,
    ConfigBase,
    Configurable,
    config_class,
    config_for_function,
    diff,
)


class Leaf(Configurable):
    @config_class
    class Config(Configurable.Config):
        rate: float = 0.1
        sizes: list = []


class Other(Configurable):
    @config_class
    class Config(Configurable.Config):
        rate: float = 0.1
        depth: int = 3


class Tree(Configurable):
    @config_class
    class Config(Configurable.Config):
        leaf: Leaf.Config = Leaf.default_config()
        many: list = []
        rules: dict = {}
        note: str | None = None


@config_class
class Wide(ConfigBase):
    text: str = ""


def add(x=1):
    return x


def sub(x=2, y=3):
    return x - y


def test_equal_configs():
    changes = diff(Tree.default_config(), Tree.default_config())
    assert not changes
    assert str(changes) == "The configs are equal."


def test_changes_are_values_with_paths():
    a = Tree.default_config().set(many=[1, 2], rules={"x": 1})
    b = a.clone(note="new", many=[1, 3, 4], rules={"y": 2})
    b.leaf.rate = 0.5
    assert list(diff(a, b)) == [
        Change("leaf.rate", 0.1, 0.5),
        Change("many[1]", 2, 3),
        Change("many[2]", ABSENT, 4),
        Change("note", None, "new"),
        Change("rules['x']", 1, ABSENT),
        Change("rules['y']", ABSENT, 2),
    ]
    assert str(diff(a, b)).splitlines() == [
        "leaf.rate: 0.1 → 0.5",
        "many[1]: 2 → 3",
        "many[2]: nothing → 4",
        "note: None → 'new'",
        "rules['x']: 1 → nothing",
        "rules['y']: nothing → 2",
    ]


def test_it_points_both_ways():
    a, b = Leaf.default_config(), Leaf.default_config().set(rate=0.5)
    assert [(c.path, c.after, c.before) for c in diff(a, b)] == list(diff(b, a))


def test_another_class_in_its_place():
    a = Tree.default_config()
    b = a.clone(leaf=Other.default_config())
    assert str(diff(a, b)).splitlines() == [
        "leaf: Leaf.Config → Other.Config",
        "leaf.sizes: [] → nothing",
        "leaf.depth: nothing → 3",
    ]


def test_another_function_in_its_place():
    a = Tree.default_config().set(leaf=config_for_function(add))
    b = a.clone(leaf=config_for_function(sub))
    assert str(diff(a, b)).splitlines() == [
        f"leaf.fn: {__name__}.add → {__name__}.sub",
        "leaf.x: 1 → 2",
        "leaf.y: nothing → 3",
    ]


def test_a_config_where_there_was_none():
    a, b = Tree.default_config(), Tree.default_config().set(many=[Leaf.default_config()])
    assert str(diff(a, b)) == "many[0]: nothing → Leaf.Config"
    a.rules = {"x": 1}
    b = a.clone(rules={"x": [1]})
    assert str(diff(a, b)) == "rules['x']: 1 → [1]"


def test_long_values_are_cut():
    line = str(diff(Wide(), Wide(text="x" * 1000)))
    assert len(line) < 200
    assert line.endswith("…")


def test_absent_says_so():
    assert repr(ABSENT) == "ABSENT"
