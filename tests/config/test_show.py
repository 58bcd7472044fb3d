import math

from weft.config import REQUIRED, ConfigBase, Configurable, Required, config_class


class Layer(Configurable):
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
    assert Layer.default_config().set(dim=3).debug_string().splitlines() == [
        "act: 'math.sqrt'",
        "dim: 3",
        f"klass: '{__name__}.Layer'",
    ]


def test_separators_and_what_is_left_out():
    cfg = Many(items_=[1], rules={"a": len, "b": int})
    assert cfg.debug_string(kv_separator="=", field_separator=";") == (
        "items_[0]=1;note='x';pair=();rules['a']='len';rules['b']='int'"
    )
    assert Layer.default_config().debug_string(omit_default_values=()).splitlines()[1:] == [
        "dim: REQUIRED",
        f"klass: '{__name__}.Layer'",
        "name: None",
    ]


def test_repr_is_one_line():
    cfg = Many(items_=[Layer.default_config()], rules={"a": len}, pair=(1,))
    assert repr(cfg) == (
        "Many(items_=[Layer.Config(act=sqrt, dim=REQUIRED, name=None)], note='x', pair=(1,), "
        "rules={'a': len})"
    )


def test_a_long_repr_leaves_out_defaults_and_stays_short():
    cfg = Many(items_=[Layer.default_config().set(dim=i) for i in range(40)])
    assert "act=" not in repr(cfg)
    assert "Layer.Config(dim=39)" in repr(cfg)
    cfg = Many(items_=[Layer.default_config().set(dim=i) for i in range(1000)])
    assert len(repr(cfg)) <= 1500
    assert repr(cfg).endswith(" …")
