import copy
import inspect
import os
import pickle
import threading

import pytest

from weft.config import (
    Configurable,
    Origin,
    UnknownFieldError,
    config_class,
    config_for_function,
    origin,
)


class Leaf(Configurable):
    @config_class
    class Config(Configurable.Config):
        rate: float = 0.1
        sizes: list = [1]


class Tree(Configurable):
    @config_class
    class Config(Configurable.Config):
        leaf: Leaf.Config = Leaf.default_config()
        many: list = []


def line_above():
    frame = inspect.currentframe().f_back
    return Origin(__file__, frame.f_lineno - 1)


def test_each_way_of_setting_is_remembered():
    cfg = Leaf.default_config()
    assert origin(cfg, "rate") is None
    cfg.rate = 0.2
    line = line_above()
    assert origin(cfg, "rate") == line
    cfg.set(rate=0.3)
    line = line_above()
    assert origin(cfg, "rate") == line
    cfg = cfg.clone(rate=0.4)
    line = line_above()
    assert origin(cfg, "rate") == line
    tree = Tree.default_config().set(many=[cfg])
    tree.set_recursively("many[0].rate", value=0.5)
    line = line_above()
    assert origin(tree, "many[0].rate") == line


@pytest.mark.parametrize(
    "copier",
    [copy.deepcopy, lambda c: c.clone(), lambda c: pickle.loads(pickle.dumps(c))],
)
def test_copies_keep_it(copier):
    cfg = Leaf.default_config()
    cfg.rate = 0.2
    line = line_above()
    tree = copier(Tree.default_config().set(leaf=cfg))
    assert origin(tree, "leaf.rate") == line
    assert origin(tree, "leaf") != line


def test_inside_of_a_list_it_is_that_of_the_field():
    cfg = Leaf.default_config()
    cfg.sizes = [1, 2]
    line = line_above()
    assert origin(cfg, "sizes[1]") == line


def test_a_copy_that_changes_leaves_the_original_alone():
    cfg = Leaf.default_config().set(rate=0.2)
    before = origin(cfg, "rate")
    cfg.clone().rate = 0.3
    assert origin(cfg, "rate") == before


def test_a_config_of_a_function():
    def make(x=1):
        return x

    cfg = config_for_function(make).set(x=2)
    assert origin(cfg, "x") == line_above()


def test_a_path_that_leads_nowhere():
    with pytest.raises(UnknownFieldError, match="Did you mean 'rate'"):
        origin(Tree.default_config(), "leaf.raet")
    with pytest.raises(UnknownFieldError, match="The path is empty"):
        origin(Tree.default_config(), "")


def test_it_reads_as_file_and_line():
    assert str(Origin("override")) == "override"
    assert str(Origin(os.path.abspath("recipes/lm.py"), 42)) == os.path.join("recipes", "lm.py:42")
    assert str(Origin("/far/away.py", 1)) == "/far/away.py:1"


def test_origins_do_not_count_for_equality():
    first = Leaf.default_config().set(rate=0.2)
    second = Leaf.default_config()
    second.rate = 0.2
    assert first == second


def test_a_thread_has_lines_too():
    cfg = Leaf.default_config()
    thread = threading.Thread(target=setattr, args=(cfg, "rate", 0.5))
    thread.start()
    thread.join()
    assert origin(cfg, "rate").file.endswith("threading.py")
