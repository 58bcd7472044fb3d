import copy
import inspect
import math
import os
import pickle
import subprocess
import sys
import threading
import types

import pytest

from weft.config import (
    REQUIRED,
    ConfigBase,
    Configurable,
    FrozenConfigError,
    InstantiableConfig,
    InvalidConfigValueError,
    Origin,
    Required,
    UnknownFieldError,
    config_class,
    origin,
)
from weft.config.text_writer import to_text


class Dropout(Configurable):
    @config_class
    class Config(Configurable.Config):
        rate: float = 0.1


class Layer(Configurable):
    @config_class
    class Config(Configurable.Config):
        dim: Required[int] = REQUIRED
        dropout: Dropout.Config = Dropout.default_config()
        sizes: list[int] = [1, 2]


class Model(Configurable):
    @config_class
    class Config(Configurable.Config):
        layers: list[InstantiableConfig] = []
        by_name: dict[str, InstantiableConfig] = {}
        pair: tuple = ()


# Fields.


def test_unknown_field_suggests_the_nearest():
    cfg = Dropout.default_config()
    for act in (
        lambda: cfg.set(raet=0.2),
        lambda: setattr(cfg, "raet", 0.2),
        lambda: cfg.raet,
        lambda: Dropout.Config(raet=0.2),
        lambda: cfg.clone(raet=0.2),
    ):
        with pytest.raises(UnknownFieldError) as error:
            act()
        assert str(error.value) == ("unknown field 'raet' in Dropout.Config. Did you mean 'rate'?")


def test_unknown_nested_field_names_path():
    cfg = Layer.default_config()
    with pytest.raises(UnknownFieldError, match=r"in Dropout\.Config \(at dropout\)"):
        cfg.dropout.raet = 0.2


def test_no_field_is_set_if_a_name_is_wrong():
    cfg = Layer.default_config()
    with pytest.raises(UnknownFieldError):
        cfg.set(dim=3, dmi=3)
    assert cfg.dim is REQUIRED


def test_hasattr_checks_fields():
    cfg = Layer.default_config()
    assert hasattr(cfg, "dim")
    assert not hasattr(cfg, "dmi")
    with pytest.raises(AttributeError, match="has no attribute '_missing'"):
        cfg._missing  # noqa: B018 - the access is what is tested


def test_field_cannot_be_deleted():
    with pytest.raises(UnknownFieldError, match="fields can be set, but not deleted"):
        del Layer.default_config().dim


# By value.


def test_assigned_values_are_copied():
    cfg, dropout = Layer.default_config(), Dropout.default_config()
    cfg.dropout = dropout
    dropout.rate = 0.5
    assert cfg.dropout.rate == 0.1
    cfg.dropout.rate = 0.9
    assert dropout.rate == 0.5


@pytest.mark.parametrize("wrap", [lambda c: [c], lambda c: (c,), lambda c: {"a": c}])
def test_values_in_containers_are_copied(wrap):
    dropout = Dropout.default_config()
    cfg = Model.default_config()
    value = wrap(dropout)
    name = {list: "layers", tuple: "pair", dict: "by_name"}[type(value)]
    setattr(cfg, name, value)
    dropout.rate = 0.7
    held = getattr(cfg, name)
    assert held is not value
    assert (held["a"] if name == "by_name" else held[0]).rate == 0.1


def test_shared_config_is_changed_in_one_place():
    layer = Layer.default_config()
    cfg = Model.default_config().set(layers=[layer, layer])
    cfg.layers[0].dim = 1
    assert cfg.layers[1].dim is REQUIRED


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda c: c.clone()])
def test_every_copy_is_equal_and_independent(copier):
    cfg = Model.default_config().set(layers=[Layer.default_config().set(dim=4)])
    result = copier(cfg)
    assert result == cfg
    result.layers[0].dropout.rate = 0.9
    assert result != cfg


def test_pickle():
    cfg = Layer.default_config().set(dim=4)
    cfg.dropout.rate = 0.3
    loaded = pickle.loads(pickle.dumps(cfg))
    assert loaded == cfg
    assert loaded.klass is Layer
    loaded.dim = 5
    assert cfg.dim == 4


# Comparing.


def test_equality_is_by_value():
    assert Layer.default_config() == Layer.default_config()
    assert Layer.default_config() != Layer.default_config().set(dim=1)
    assert Layer.default_config() != Dropout.default_config()
    assert Layer.default_config() != "something else"


def test_config_is_not_hashable():
    with pytest.raises(TypeError, match="unhashable"):
        hash(Layer.default_config())


# Frozen views.


def test_config_of_an_object_cannot_be_set():
    layer = Dropout(Dropout.default_config())
    with pytest.raises(FrozenConfigError) as error:
        layer.config.rate = 0.5
    assert "Dropout.Config is frozen" in str(error.value)
    assert "cfg = self.config.clone(rate=…)" in str(error.value)
    assert layer.config.clone(rate=0.5).rate == 0.5


def test_set_changes_a_copy_of_the_config_of_an_object():
    layer = Dropout(Dropout.default_config())
    rate = layer.config.rate
    cfg = layer.config
    assert cfg.set(rate=0.5) is cfg
    assert (cfg.rate, layer.config.rate) == (0.5, rate)
    cfg.rate = 0.25
    assert cfg.instantiate().config.rate == 0.25


def test_fields_are_counted_and_found():
    cfg = Dropout.default_config()
    assert len(cfg) == len(cfg.keys()) > 0
    assert "rate" in cfg and "ratio" not in cfg
    assert bool(cfg)


def test_configs_inside_a_view_are_copies():
    model = Layer(Layer.default_config().set(dim=4))
    cfg = model.config
    dropout = cfg.dropout.set(rate=0.5)
    assert dropout.rate == 0.5
    assert cfg.dropout.rate == 0.5  # this view sees it, the object does not
    assert model.config.dropout.rate == 0.1
    cfg.sizes.append(9)
    assert model.config.sizes == [1, 2]


def test_view_is_a_whole_config():
    cfg = Layer.default_config().set(dim=4)
    view = Layer(cfg).config
    assert view == cfg
    assert view.keys() == cfg.keys()
    assert repr(view) == repr(cfg)
    assert pickle.loads(pickle.dumps(view)) == cfg
    with pytest.raises(UnknownFieldError, match="Did you mean 'dim'"):
        view.dmi  # noqa: B018 - the access is what is tested


# Methods defined in other files.


def test_wrong_value_names_its_path():
    cfg = Model.default_config().set(layers=[Layer.default_config()])
    with pytest.raises(InvalidConfigValueError, match=r"layers\[0\]\.dropout\.rate: Dropout\.Con"):
        cfg.layers[0].dropout.rate = "high"


def test_dicts_and_strings():
    cfg = Layer.default_config().set(dim=1)
    assert cfg.to_dict() == {
        "dim": 1,
        "dropout": {"klass": Dropout, "rate": 0.1},
        "klass": Layer,
        "sizes": [1, 2],
    }
    assert cfg.to_flat_dict(omit_default_values=()) == {
        "dim": 1,
        "dropout.klass": Dropout,
        "dropout.rate": 0.1,
        "klass": Layer,
        "sizes[0]": 1,
        "sizes[1]": 2,
    }
    assert "dropout.rate: 0.1" in cfg.debug_string().splitlines()
    assert repr(cfg) == "Layer.Config(dim=1, dropout=Dropout.Config(rate=0.1), sizes=[1, 2])"


def test_visit():
    seen = []
    Dropout.default_config().visit(visit_fn=lambda path, value: seen.append((path, value)))
    assert seen == [("klass", Dropout), ("rate", 0.1)]


class Block(Configurable):
    @config_class
    class Config(Configurable.Config):
        dim: Required[int] = REQUIRED
        act: object = math.sqrt
        name: str | None = None


@config_class
class Many(ConfigBase):
    items_: list = []
    note: str = "x"
    pair: tuple = ()
    rules: dict = {}


def test_one_line_per_leaf():
    assert Block.default_config().set(dim=3).debug_string().splitlines() == [
        "act: 'math.sqrt'",
        "dim: 3",
        f"klass: '{__name__}.Block'",
    ]


def test_ipython_shows_the_text_form_over_lines():
    shown = []
    cfg = Layer.default_config().set(dim=8)
    cfg._repr_pretty_(types.SimpleNamespace(text=shown.append), False)
    assert shown == [to_text(cfg, omit_defaults=True)] and shown[0].count("\n") > 1


def test_long_repr_omits_defaults():
    cfg = Many(items_=[Block.default_config().set(dim=i) for i in range(40)])
    assert "act=" not in repr(cfg)
    assert "Block.Config(dim=39)" in repr(cfg)
    cfg = Many(items_=[Block.default_config().set(dim=i) for i in range(1000)])
    assert len(repr(cfg)) == 1500
    assert repr(cfg).endswith(" …")


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


def test_origin_of_each_setter_is_kept():
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


def test_origin_of_unknown_path():
    with pytest.raises(UnknownFieldError, match="Did you mean 'rate'"):
        origin(Tree.default_config(), "leaf.raet")
    with pytest.raises(UnknownFieldError, match="The path is empty"):
        origin(Tree.default_config(), "")


def test_origin_is_file_and_line():
    assert str(Origin("override")) == "override"
    assert str(Origin(os.path.abspath("recipes/lm.py"), 42)) == os.path.join("recipes", "lm.py:42")
    assert str(Origin("/far/away.py", 1)) == "/far/away.py:1"


def test_origin_in_a_notebook_is_cell_and_line():
    pytest.importorskip("IPython")
    program = (
        "import sys; from weft.config import Origin; "
        "print(Origin(sys._getframe().f_code.co_filename, 3), Origin('/far/away.py', 1))"
    )
    ipython = [sys.executable, "-m", "IPython", "--no-banner", "--colors=nocolor", "-c", program]
    done = subprocess.run(ipython, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.split() == ["In[1]:3", "/far/away.py:1"]


def test_equality_ignores_origins():
    first = Leaf.default_config().set(rate=0.2)
    second = Leaf.default_config()
    second.rate = 0.2
    assert first == second


def test_origins_in_thread():
    cfg = Leaf.default_config()
    thread = threading.Thread(target=setattr, args=(cfg, "rate", 0.5))
    thread.start()
    thread.join()
    assert origin(cfg, "rate").file.endswith("threading.py")
