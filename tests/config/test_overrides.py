import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import optax
import pytest

from weft.config import (
    REQUIRED,
    ConfigBase,
    ConfigOverrideError,
    ConfigReferenceError,
    ConfigTextError,
    ConfigTypeError,
    Configurable,
    InstantiableConfig,
    InvalidConfigValueError,
    Origin,
    Required,
    UnknownFieldError,
    apply_overrides,
    config_class,
    config_for_function,
    origin,
    register_validator,
    validation,
)


class Mode(enum.Enum):
    FAST = 1
    SAFE = 2


@dataclasses.dataclass(frozen=True)
class Spec:
    size: int = 1
    names: tuple[str, ...] = ()
    note: "str | None" = None


class Dropout(Configurable):
    @config_class
    class Config(Configurable.Config):
        rate: float = 0.1


class Layer(Configurable):
    @config_class
    class Config(Configurable.Config):
        dim: Required[int] = REQUIRED
        dropout: Dropout.Config = Dropout.default_config()
        act: Callable | str = "relu"
        dtype: Any = None


class Trainer(Configurable):
    @config_class
    class Config(Configurable.Config):
        layers: list[Layer.Config] = []
        optimizer: InstantiableConfig = config_for_function(optax.sgd)
        mode: Mode = Mode.FAST
        axes: tuple[str, ...] = ("data",)
        mesh: tuple[int, str] = (1, "x")
        rules: dict[str, float] = {"bias": 0.0}
        nested: dict[str, list[int]] = {"a": [1]}
        anything: Any = "text"
        spec: Spec = Spec()
        limit: int | None = None


@pytest.fixture
def cfg():
    layers = [Layer.default_config() for _ in range(3)]
    return Trainer.default_config().set(layers=layers)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("layers[2].dropout.rate=0.3", "layers[2].dropout.rate", 0.3),
        ("layers[-1].dim=8", "layers[2].dim", 8),
        ("optimizer.learning_rate=3e-4", "optimizer.learning_rate", 3e-4),
        ("optimizer.nesterov=true", "optimizer.nesterov", True),
        ("optimizer.momentum=0.9", "optimizer.momentum", 0.9),
        ("mode=SAFE", "mode", Mode.SAFE),
        ("axes=data,model", "axes", ("data", "model")),
        ("mesh[0]=4", "mesh", (4, "x")),
        ("mesh[1]=4", "mesh", (1, "4")),
        ("rules.bias=1", "rules", {"bias": 1.0}),
        ("rules['new one']=2", "rules", {"bias": 0.0, "new one": 2.0}),
        ("nested.a[0]=7", "nested", {"a": [7]}),
        ("nested={b: [1, 2]}", "nested", {"b": [1, 2]}),
        ("anything=3", "anything", "3"),
        ("spec.size=2", "spec", Spec(size=2)),
        ("spec.names=a,b", "spec", Spec(names=("a", "b"))),
        ("spec.note=x", "spec", Spec(note="x")),
        ("limit=5", "limit", 5),
        ("limit=None", "limit", None),
        ("layers[0].dtype=bfloat16", "layers[0].dtype", "bfloat16"),
        ("layers[0].act=optax.sgd", "layers[0].act", optax.sgd),
        ("layers[0].act=gelu", "layers[0].act", "gelu"),
        ("layers=[]", "layers", []),
        ("  limit = 5 ", "limit", 5),
        ("anything=a=b", "anything", "a=b"),
        ("layers[0].dim=REQUIRED", "layers[0].dim", REQUIRED),
    ],
)
def test_values_are_set(cfg, override, path, value):
    assert apply_overrides(cfg, [override]) is cfg
    assert cfg.get_recursively(path) == value
    assert type(cfg.get_recursively(path)) is type(value)


def test_a_part_may_be_exchanged(cfg):
    apply_overrides(
        cfg,
        [
            "optimizer=config_for_function(optax.adamw)(learning_rate=1e-3)",
            f"layers[0]={__name__}.Dropout.Config(rate=0.5)",
            "optimizer.b1=0.5",
        ],
    )
    assert cfg.optimizer == config_for_function(optax.adamw).set(learning_rate=1e-3, b1=0.5)
    assert cfg.layers[0] == Dropout.default_config().set(rate=0.5)


def test_parts_keep_their_identity(cfg):
    layer = cfg.layers[1]
    apply_overrides(cfg, ["layers[1].dim=4"])
    assert layer.dim == 4


@pytest.mark.parametrize(
    ("override", "kind", "message"),
    [
        ("limit", ConfigOverrideError, "'limit' is not an override. Write path=value"),
        ("=3", ConfigOverrideError, "'=3' is not an override"),
        ("limti=3", UnknownFieldError, "limti=3: unknown field 'limti' in Trainer.Config. Did you"),
        (
            "rate=3",
            UnknownFieldError,
            "There is layers[0].dropout.rate and layers[1].dropout.rate and layers[2]",
        ),
        ("layers[9].dim=3", UnknownFieldError, "layers: there is no [9] in a list of length 3"),
        ("spec.sise=3", UnknownFieldError, "unknown field 'sise' in Spec"),
        ("a..b=3", UnknownFieldError, "'a..b' is not a path"),
        (
            "layers[0].dim=wide",
            ConfigTypeError,
            "layers[0].dim=wide: expected int, but got 'wide'. It is REQUIRED, by default.",
        ),
        ("mode=SLOW", ConfigTypeError, "expected Mode, but got 'SLOW'. It is "),
        ("limit=x", ConfigTypeError, "limit=x: expected int | None, but got 'x'. It is 7, set at"),
        ("mesh=1", ConfigTypeError, "expected tuple[int, str], but got '1'"),
        ("rules.bias=x", ConfigTypeError, "expected float, but got 'x'. It is 0.0"),
        ("rules.new=x", ConfigTypeError, "rules.new=x: expected float, but got 'x'."),
        ("optimizer.nesterov=x", ConfigTypeError, "expected bool, but got 'x'. It is False"),
        ("optimizer=3", ConfigTypeError, "expected InstantiableConfig, but got '3'"),
        ("optimizer=os.system", ConfigReferenceError, "a text may not name 'os.system'"),
        (
            "optimizer=config_for_function(os.system)(command='true')",
            ConfigReferenceError,
            "a text may not name 'os.system'",
        ),
        (
            "optimizer=config_for_function(optax.sgd)(rate=1)",
            UnknownFieldError,
            "unknown field 'rate' in config_for_function(sgd)",
        ),
        ("optimizer=f(", ConfigTextError, "this is not a config text"),
        (
            "layers=[3]",
            ConfigTypeError,
            "layers=[3]: expected list[Layer.Config], but got '[3]'",
        ),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_set(cfg, override, kind, message):
    before = cfg.clone()
    with pytest.raises(kind) as error:
        apply_overrides(cfg, ["limit=7", override])
    assert type(error.value) is kind
    assert message in str(error.value)
    assert cfg == before


def test_the_error_says_where_the_value_was_set(cfg):
    cfg.limit = 3
    with pytest.raises(ConfigTypeError, match=r"It is 3, set at .*test_overrides\.py:\d+\."):
        apply_overrides(cfg, ["limit=x"])


def test_where_it_comes_from_is_remembered(cfg):
    apply_overrides(cfg, ["layers[0].dim=3"], source="command line")
    assert origin(cfg, "layers[0].dim") == Origin("command line")
    with pytest.raises(ConfigTypeError, match=r"It is 3, set at command line\."):
        apply_overrides(cfg, ["layers[0].dim=x"])


def test_own_packages_may_be_trusted(cfg):
    override = f"layers[0].dtype={__name__}.Spec(size=3)"
    with pytest.raises(ConfigReferenceError):
        apply_overrides(cfg, [override])
    apply_overrides(cfg, [override], allow=(__name__,))
    assert cfg.layers[0].dtype.size == 3


def test_a_value_that_a_rule_refuses(cfg, monkeypatch):
    def refuse(value):
        raise InvalidConfigValueError(f"{value} is too big.")

    monkeypatch.setattr(validation, "_validators", list(validation._validators))
    register_validator(match_fn=lambda value: value == 10**6, validate_fn=refuse)
    with pytest.raises(InvalidConfigValueError) as error:
        apply_overrides(cfg, ["limit=1e6"])
    assert str(error.value) == ("limit=1e6: limit: 1000000 is too big. It is None, by default.")


def test_a_type_that_nobody_knows():
    @config_class
    class Lenient(ConfigBase):
        value: "Unknown" = None  # noqa: F821 - it is what is tested

    assert apply_overrides(Lenient(), ["value=3"]).value == 3


def test_a_config_cannot_lose_a_part(cfg):
    with pytest.raises(InvalidConfigValueError, match=r"expected Dropout\.Config, but got"):
        apply_overrides(cfg, ["layers[0].dropout=None"])
