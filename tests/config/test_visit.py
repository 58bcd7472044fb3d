import dataclasses
from typing import Any

from weft.config import REQUIRED, ConfigBase, Required, config_class


@dataclasses.dataclass
class Spec:
    size: int
    inner: Any = None


@config_class
class Leaf(ConfigBase):
    rate: float = 0.1
    name: str | None = None


@config_class
class Tree(ConfigBase):
    dim: Required[int] = REQUIRED
    leaf: Leaf = Leaf()
    many: list = []
    rules: dict = {}
    spec: Any = None


def tree():
    return Tree(
        dim=3, many=[Leaf(), (1, 2)], rules={"a": Leaf(rate=0.5), 3: "x"}, spec=Spec(1, Leaf())
    )


def test_every_leaf_is_visited_with_its_path():
    seen = {}
    tree().visit(visit_fn=seen.__setitem__)
    assert seen == {
        "dim": 3,
        "leaf.name": None,
        "leaf.rate": 0.1,
        "many[0].name": None,
        "many[0].rate": 0.1,
        "many[1][0]": 1,
        "many[1][1]": 2,
        "rules['a'].name": None,
        "rules['a'].rate": 0.5,
        "rules[3]": "x",
        "spec.size": 1,
        "spec.inner.name": None,
        "spec.inner.rate": 0.1,
    }
    assert list(seen)[:3] == ["dim", "leaf.name", "leaf.rate"]


def test_enter_may_stop_and_redirect():
    seen = {}

    def enter(path, value, children):
        if isinstance(value, Leaf):
            return None
        if path == "rules":
            return [("elsewhere", 1)]
        return children

    tree().visit(visit_fn=seen.__setitem__, enter_fn=enter)
    assert seen["leaf"] == Leaf()
    assert seen["elsewhere"] == 1
    assert not any(path.startswith("rules") for path in seen)


def test_exit_comes_after_the_children():
    order = []
    Tree(dim=1).visit(
        visit_fn=lambda path, value: order.append(path),
        exit_fn=lambda path, value: order.append(f"/{path}"),
    )
    assert order == [
        "dim",
        *("leaf.name", "leaf.rate", "/leaf"),
        *("/many", "/rules", "spec", "/"),
    ]


def test_to_dict_replaces_configs_only():
    assert tree().to_dict() == {
        "dim": 3,
        "leaf": {"name": None, "rate": 0.1},
        "many": [{"name": None, "rate": 0.1}, (1, 2)],
        "rules": {"a": {"name": None, "rate": 0.5}, 3: "x"},
        "spec": Spec(1, Leaf()),
    }


def test_the_dict_is_independent():
    cfg = tree()
    cfg.to_dict()["many"].append(1)
    assert len(cfg.many) == 2


def test_flat_dict_keeps_empty_containers():
    assert Tree(dim=1).to_flat_dict(omit_default_values=()) == {
        "dim": 1,
        "leaf.name": None,
        "leaf.rate": 0.1,
        "many": [],
        "rules": {},
        "spec": None,
    }


def test_defaults_are_left_out_if_they_are_listed():
    assert Tree().to_flat_dict(omit_default_values=(None, REQUIRED)) == {
        "leaf.rate": 0.1,
        "many": [],
        "rules": {},
    }
    assert Tree().to_flat_dict(omit_default_values=(0.1,))["leaf.name"] is None


def test_a_listed_value_is_shown_where_it_is_not_the_default():
    assert Tree(dim=REQUIRED, spec=3).set(rules={"a": None}).to_flat_dict(
        omit_default_values=(None,)
    ) == {"dim": REQUIRED, "leaf.rate": 0.1, "many": [], "rules['a']": None, "spec": 3}
