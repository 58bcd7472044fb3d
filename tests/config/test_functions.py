import dataclasses
import functools
from typing import Any

import attrs
import flax.nnx
import jax.numpy as jnp
import optax
import pytest

from weft.config import (
    REQUIRED,
    ClassConfigBase,
    ConfigBase,
    ConfigTypeError,
    Configurable,
    InstantiableConfig,
    InvalidConfigClassError,
    InvalidConfigNameError,
    InvalidConfigValueError,
    RequiredFieldMissingError,
    UnknownFieldError,
    config_class,
    config_for_class,
    config_for_function,
    maybe_instantiate,
)


def scale(x: float, by: float = 2.0, *, tags: list = ()):
    return (x, by, tags)


def gather(first, /, second=2, *args, key=0, **kwargs):
    return (first, second, args, key, kwargs)


class Schedule:
    def __init__(self, peak: float, warmup: int = 10):
        self.peak, self.warmup = peak, warmup


class Passing(type):
    def __call__(cls, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class Called(metaclass=Passing):
    """Called by a metaclass that passes all arguments on, as modules of Flax NNX are."""

    def __init__(self, size: int, scale: float = 1.0):
        self.size, self.scale = size, scale


class Layer(Configurable):
    @config_class
    class Config(Configurable.Config):
        dim: int = 1


def test_class():
    cfg = config_for_class(Schedule)
    assert isinstance(cfg, ClassConfigBase)
    assert dict(cfg.items()) == {"klass": Schedule, "peak": REQUIRED, "warmup": 10}
    made = cfg.set(peak=0.1).instantiate()
    assert type(made) is Schedule
    assert (made.peak, made.warmup) == (0.1, 10)
    assert cfg.instantiate() is not cfg.instantiate()


def test_optax():
    params = {"w": jnp.ones(2)}
    optimizer = config_for_function(optax.sgd).set(learning_rate=0.5).instantiate()
    updates, _ = optimizer.update(params, optimizer.init(params))
    assert updates["w"].tolist() == [-0.5, -0.5]


def test_extra_arguments_replace_fields():
    assert config_for_function(scale).instantiate(x=1.0, by=3.0) == (1.0, 3.0, ())
    assert config_for_function(gather).instantiate(first=1, other=4) == (1, 2, (), 0, {"other": 4})


def test_every_kind_of_parameter():
    cfg = config_for_function(gather)
    assert cfg.keys() == ["args", "first", "fn", "key", "kwargs", "second"]
    assert (cfg.args, cfg.kwargs) == ((), {})
    assert cfg.set(first=1).instantiate() == (1, 2, (), 0, {})
    cfg.set(args=(3, 4), kwargs={"z": 5}, key=6)
    assert cfg.instantiate() == (1, 2, (3, 4), 6, {"z": 5})


def test_missing_argument():
    with pytest.raises(RequiredFieldMissingError) as error:
        config_for_class(Schedule).instantiate()
    assert "peak is still REQUIRED in config_for_class(Schedule), which was created at " in str(
        error.value
    )
    assert "test_functions.py:" in str(error.value)


def test_unknown_argument():
    with pytest.raises(UnknownFieldError, match=r"'bye' in config_for_function\(scale\)\. Did you"):
        config_for_function(scale).set(bye=1)


def test_annotations_are_checked():
    with pytest.raises(ConfigTypeError, match="declares float there, but got 'x'"):
        config_for_function(scale).set(by="x")


def test_annotations_of_a_wrapped_function_are_checked():
    def inner(x: "Spec | int" = 1):
        return x

    wrapped = functools.wraps(inner)(lambda *args, **kwargs: inner(*args, **kwargs))
    assert config_for_function(wrapped).set(x=Spec("a")).instantiate() == Spec("a")
    with pytest.raises(ConfigTypeError, match=r"declares Spec \| int there"):
        config_for_function(wrapped).set(x="a")


def test_configs_among_the_values_are_instantiated():
    cfg = config_for_function(scale).set(
        x=config_for_function(scale).set(x=1.0),
        tags=[config_for_class(Schedule).set(peak=1.0), {"deep": (Layer.default_config(),)}],
    )
    x, by, tags = cfg.instantiate()
    assert x == (1.0, 2.0, ())
    assert by == 2.0
    assert type(tags[0]) is Schedule
    assert type(tags[1]["deep"][0]) is Layer
    assert isinstance(cfg.tags[0], ClassConfigBase)  # the config itself has not changed


def takes_configs(a: Layer.Config, b: InstantiableConfig | None = None, c: Any = None):
    return a, b, c


def test_declared_configs_are_not_instantiated():
    layer = Layer.default_config()
    a, b, c = config_for_function(takes_configs).set(a=layer, b=layer, c=layer).instantiate()
    assert a == layer
    assert b == layer
    assert type(c) is Layer


def private(x, _depth=0):
    return x, _depth


def private_required(_x):
    return _x


def test_private_parameters():
    assert config_for_function(private).set(x=1).instantiate() == (1, 0)
    with pytest.raises(InvalidConfigNameError, match="'_x': fields are public"):
        config_for_function(private_required)


@dataclasses.dataclass
class Spec:
    name: str
    sizes: list = dataclasses.field(default_factory=lambda: [1])


@attrs.define
class Pair:
    left: int
    right: list = attrs.field(factory=list)


def test_default_factories():
    cfg = config_for_class(Spec)
    assert cfg.sizes == [1]
    cfg.sizes.append(2)
    assert cfg.set(name="a").instantiate() == Spec("a", [1, 2])
    assert config_for_class(Pair).set(left=1).instantiate() == Pair(1, [])


def test_any_callable():
    class Adder:
        def __call__(self, x: int, y: int = 1):
            return x + y

    assert config_for_function(Adder()).set(x=2).instantiate() == 3
    assert config_for_function(lambda x=1: x).instantiate() == 1
    assert config_for_function(dict.fromkeys).set(iterable=("a",)).instantiate() == {"a": None}


def test_function_may_be_replaced_if_parameters_match():
    def double(x: float, by: float = 4.0, *, tags: list = ()):
        return x * by

    cfg = config_for_function(scale).set(x=3.0)
    cfg.fn = double
    assert cfg.instantiate() == 6.0
    assert cfg.clone().instantiate() == 6.0
    with pytest.raises(InvalidConfigValueError) as error:
        cfg.fn = gather
    assert "cannot be turned into a config of gather, which has other parameters" in str(
        error.value
    )
    assert "Create a new config: config_for_function(gather)" in str(error.value)


def fn_parameter(fn):
    return fn


def keys_parameter(keys=()):
    return keys


@pytest.mark.parametrize(
    ("make", "error_type", "message"),
    [
        (lambda: config_for_function(3), InvalidConfigValueError, "takes a function, but got 3"),
        (
            lambda: config_for_function(config_for_function(scale)),
            InvalidConfigValueError,
            "takes a function, but got config_for_function",
        ),
        (lambda: config_for_class(scale), InvalidConfigValueError, "takes a class, but got <func"),
        (lambda: config_for_class(Layer), InvalidConfigClassError, "Write Layer.default_config()"),
        (
            lambda: config_for_class(type),
            InvalidConfigValueError,
            "config_for_class cannot read the parameters of type",
        ),
        (
            lambda: config_for_function(fn_parameter),
            InvalidConfigNameError,
            "fn_parameter has a parameter 'fn', a name that config_for_function reserves",
        ),
        (
            lambda: config_for_function(keys_parameter),
            InvalidConfigNameError,
            "keys_parameter has a parameter 'keys', but every config has a method",
        ),
    ],
)
def test_objects_without_config(make, error_type, message):
    with pytest.raises(error_type) as error:
        make()
    assert message in str(error.value)


def test_instantiate_accepts_any_argument():
    class Window:
        def __init__(self, width, positions):
            self.width, self.positions = width, positions

    cfg = config_for_class(Window).set(width=3)
    positions = iter(())  # neither copied nor compared
    assert cfg.instantiate(positions=positions).positions is positions
    with pytest.raises(RequiredFieldMissingError, match="positions is still REQUIRED"):
        cfg.instantiate()


def test_maybe_instantiate_leaves_plain_configs():
    @config_class
    class Data(ConfigBase):
        x: int = 1

    data = Data()
    assert maybe_instantiate([data])[0] is data


def test_class_with_metaclass_call_uses_init_signature():
    cfg = config_for_class(Called)
    assert sorted(cfg.keys()) == ["klass", "scale", "size"]
    made = cfg.set(size=3).instantiate()
    assert (made.size, made.scale) == (3, 1.0)
    with pytest.raises(ConfigTypeError):
        cfg.set(size="large")
    assert sorted(config_for_class(type("Open", (Called,), {})).keys()) == sorted(cfg.keys())


def test_modules_of_flax_nnx_have_fields():
    cfg = config_for_class(flax.nnx.Linear).set(in_features=3, out_features=2)
    assert cfg.instantiate(rngs=flax.nnx.Rngs(0)).kernel.shape == (3, 2)
