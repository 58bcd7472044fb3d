import collections.abc
import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NewType, Optional, Union

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
    Required,
    UnknownFieldError,
    apply_overrides,
    config_class,
    config_for_function,
    register_validator,
    validation,
)
from weft.config.overrides import NoConversion, convert
from weft.config.text_parser import read_value


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


def test_part_may_be_replaced(cfg):
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
def test_invalid_override_changes_nothing(cfg, override, kind, message):
    before = cfg.clone()
    with pytest.raises(kind) as error:
        apply_overrides(cfg, ["limit=7", override])
    assert type(error.value) is kind
    assert message in str(error.value)
    assert cfg == before


def test_packages_may_be_allowed(cfg):
    override = f"layers[0].dtype={__name__}.Spec(size=3)"
    with pytest.raises(ConfigReferenceError):
        apply_overrides(cfg, [override])
    apply_overrides(cfg, [override], allow=(__name__,))
    assert cfg.layers[0].dtype.size == 3


def test_value_rejected_by_rule(cfg, monkeypatch):
    def refuse(value):
        raise InvalidConfigValueError(f"{value} is too big.")

    monkeypatch.setattr(validation, "_validators", list(validation._validators))
    register_validator(match_fn=lambda value: value == 10**6, validate_fn=refuse)
    with pytest.raises(InvalidConfigValueError) as error:
        apply_overrides(cfg, ["limit=1e6"])
    assert str(error.value) == ("limit=1e6: limit: 1000000 is too big. It is None, by default.")


def test_unknown_type():
    @config_class
    class Lenient(ConfigBase):
        value: "Unknown" = None  # noqa: F821 - it is what is tested

    assert apply_overrides(Lenient(), ["value=3"]).value == 3


def test_setting_config_to_none(cfg):
    with pytest.raises(InvalidConfigValueError, match=r"expected Dropout\.Config, but got"):
        apply_overrides(cfg, ["layers[0].dropout=None"])


class Colour(enum.Enum):
    RED = "crimson"
    BLUE = 2


Metres = NewType("Metres", float)


def read(text):
    return read_value(text, source="")


GOOD = [
    ("3", int, 3),
    ("-3", int, -3),
    ("1_000", int, 1000),
    ("1e6", int, 1_000_000),
    ("0x10", int, 16),
    (" 3 ", int, 3),
    ("3e-4", float, 3e-4),
    ("3", float, 3.0),
    ("inf", float, math.inf),
    ("1+2j", complex, 1 + 2j),
    ("true", bool, True),
    ("False", bool, False),
    ("1", bool, True),
    ("yes", bool, True),
    ("no", bool, False),
    ("0", bool, False),
    ("1e-3", str, "1e-3"),
    ("'a b'", str, "a b"),
    ("a=b", str, "a=b"),
    ("", str, ""),
    ("None", int | None, None),
    ("none", Optional[str], None),  # noqa: UP045 - both ways of writing are tested
    ("3", Union[int, str], 3),  # noqa: UP007
    ("three", int | str, "three"),
    ("3", float | int, 3),
    ("1", bool | int, 1),
    ("true", bool | int, True),
    ("3.5", int | float, 3.5),
    ("0.5", str | float | None, 0.5),
    ("REQUIRED", int, REQUIRED),
    ("3", Required[int], 3),
    ("a", Literal["a", "b"], "a"),
    ("2", Literal[1, 2], 2),
    ("'a'", Literal["a"], "a"),
    ("RED", Colour, Colour.RED),
    ("Colour.BLUE", Colour, Colour.BLUE),
    ("crimson", Colour, Colour.RED),
    ("1,2,3", tuple[int, ...], (1, 2, 3)),
    ("(1, 2)", tuple[int, int], (1, 2)),
    ("[1, 2,]", list[int], [1, 2]),
    ("data,model", collections.abc.Sequence[str], ("data", "model")),
    ("('data', 'model')", tuple[str, ...], ("data", "model")),
    ("", list[int], []),
    ("()", tuple[int, ...], ()),
    ("5", tuple[int, ...], (5,)),
    ("(1,2),(3,4)", list[tuple[int, int]], [(1, 2), (3, 4)]),
    ("[[1,2],[3]]", list[list[int]], [[1, 2], [3]]),
    ("1,x", tuple[int, str], (1, "x")),
    ("'a,b',c", list[str], ["a,b", "c"]),
    ("{1, 2}", set[int], {1, 2}),
    ("a,b", frozenset[str], frozenset("ab")),
    ("a: 1, b: 2", dict[str, int], {"a": 1, "b": 2}),
    ("{'a b': [1, 2]}", dict[str, list[int]], {"a b": [1, 2]}),
    ("{}", dict, {}),
    ("{a: 0.5, b: x}", dict, {"a": 0.5, "b": "x"}),
    ("4.5", Annotated[float, "note"], 4.5),
    ("4.5", Metres, 4.5),
    ("3", Any, 3),
    ("bfloat16", Any, "bfloat16"),
    ("[1, 'a']", Any, [1, "a"]),
    ("int", type, int),
    ("complex", collections.abc.Callable, complex),
]


def short(value):
    # The order of a set differs from process to process, and all must collect the same names.
    return str(sorted(value) if isinstance(value, set | frozenset) else value)[:30]


@pytest.mark.parametrize(("text", "hint", "value"), GOOD, ids=short)
def test_converted_strings(text, hint, value):
    result = convert(text, hint, read)
    assert result == value
    assert type(result) is type(value)


BAD = [
    ("x", int),
    ("1.5", int),
    ("inf", int),
    ("x", float),
    ("", float),
    ("x", complex),
    ("maybe", bool),
    ("2", bool),
    ("x", None),
    ("x", int | None),
    ("c", Literal["a", "b"]),
    ("GREEN", Colour),
    ("1,x", list[int]),
    ("1,2,3", tuple[int, int]),
    ("a", dict[str, int]),
    ("a:b:c", dict[str, int]),
    ("a:x", dict[str, int]),
    ("3", collections.abc.Callable),
    ("3", InstantiableConfig),
]


@pytest.mark.parametrize(("text", "hint"), BAD, ids=short)
def test_unconvertible_strings(text, hint):
    with pytest.raises(NoConversion):
        convert(text, hint, read)


def test_undeclared_type_follows_value():
    assert convert("3", Any, read, like="text") == "3"
    assert convert("true", Any, read, like=False) is True
    assert convert("3", Any, read, like=None) == 3
    with pytest.raises(NoConversion):
        convert("3", Any, read, like=True)


def test_union_reports_cause():
    with pytest.raises(NoConversion) as error:
        convert("os.system", InstantiableConfig | None, read)
    assert "may not name 'os.system'" in str(error.value.cause)


def test_forbidden_name_in_union():
    with pytest.raises(NoConversion) as error:
        convert("os.system", collections.abc.Callable, read)
    assert isinstance(error.value.cause, ConfigReferenceError)
    assert convert("os.system", str | collections.abc.Callable, read) == "os.system"


def test_error_names_origin_of_value(cfg):
    cfg.limit = 3
    with pytest.raises(ConfigTypeError, match=r"It is 3, set at .*test_overrides\.py:\d+\."):
        apply_overrides(cfg, ["limit=x"])
