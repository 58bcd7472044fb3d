import dataclasses
import enum
import os
import sys
from typing import Any, NamedTuple

import attrs
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config import (
    ConfigBase,
    ConfigError,
    ConfigReferenceError,
    ConfigTextError,
    ConfigTypeError,
    Configurable,
    InstantiableConfig,
    UnknownFieldError,
    UnreadableValueError,
    config_class,
    config_for_class,
    config_for_function,
    from_text,
    to_text,
)
from weft.config.text_parser import read_value

M = __name__
DETONATED = []


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Spec:
    size: Any = 1

    def __post_init__(self):
        DETONATED.append(self)


@attrs.define
class Pair:
    left: Any
    right: Any = None


class Leaf(Configurable):
    @config_class
    class Config(Configurable.Config):
        rate: float = 0.1
        value: Any = None

    @classmethod
    def default_config(cls):
        DETONATED.append(cls)
        return super().default_config()


class Tree(Configurable):
    @config_class
    class Config(Configurable.Config):
        leaf: InstantiableConfig | None = None
        many: list[Any] = []
        rules: dict[Any, Any] = {}
        value: Any = None


@config_class
class Data(ConfigBase):
    x: Any = None


def scale(x: Any = 1.0, *args, by: Any = 2.0, **kwargs):
    return x


class Foreign:
    def __init__(self, x=1):
        DETONATED.append(self)


# Any config reads back.

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.sampled_from([Colour.RED, Colour.BLUE, int, Leaf, Foreign, scale, optax.sgd]),
    st.frozensets(st.integers() | st.text()),
    st.sets(st.integers()),
)
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.tuples(st.integers(), st.text()))


def configs(values):
    def leaf(rate, value):
        return Leaf.Config(klass=Leaf, rate=rate, value=value)

    def tree(leaf, many, rules):
        return Tree.default_config().set(leaf=leaf, many=many, rules=rules)

    some_leaf = st.builds(leaf, st.floats(), values)
    return st.one_of(
        some_leaf,
        st.builds(tree, st.none() | some_leaf, st.lists(values), st.dictionaries(keys, values)),
        st.builds(lambda x: Data(x=x), values),
        st.builds(lambda x, by: config_for_function(scale).set(x=x, by=by), values, values),
        st.builds(lambda x: config_for_class(Foreign).set(x=x), values),
        st.builds(Point, values, values),
        st.builds(Pair, values, values),
        st.lists(values),
        st.tuples(values, values),
        st.dictionaries(keys, values),
    )


@settings(deadline=None, max_examples=25)
@given(st.recursive(leaves, configs, max_leaves=12), st.booleans(), st.booleans())
def test_any_config_reads_back_equal(value, omit_defaults, origins):
    cfg = Tree.default_config().set(value=value)
    text = to_text(cfg, omit_defaults, origins=origins)
    again = from_text(text, allow=(M,))
    assert again == cfg
    assert to_text(again, omit_defaults) == to_text(cfg, omit_defaults)


@settings(deadline=None, max_examples=25)
@given(st.text())
def test_other_text_is_rejected(text):
    with pytest.raises(ConfigTextError):
        from_text(text)


# No side effects.


def test_reading_runs_no_constructor_and_no_method():
    cfg = Tree.default_config().set(
        value=Spec(3), leaf=config_for_class(Foreign), many=[Leaf.Config(klass=Leaf)]
    )
    DETONATED.clear()
    assert from_text(to_text(cfg), allow=(M,)) == cfg
    assert DETONATED == []


def test_configurables_are_allowed():
    assert from_text(f"{M}.Leaf.Config(rate=0.5)") == Leaf.Config(klass=Leaf, rate=0.5)


HOSTILE = [
    "__import__('os').system('touch {path}')",
    "os.system('touch {path}')",
    "config_for_function(os.system)(command='touch {path}')",
    "config_for_function(posix.system)(command='touch {path}')",
    "config_for_function(subprocess.run)(args=['touch', '{path}'])",
    "config_for_class(subprocess.Popen)(args=['touch', '{path}'])",
    "config_for_function(builtins.eval)(args=(\"open('{path}', 'w')\",))",
    "config_for_function(builtins.open)(file='{path}', mode='w')",
    "config_for_function(optax.sgd)(learning_rate=os.remove)",
    "config_for_function(optax.sgd)(fn=os.system, learning_rate='touch {path}')",
    "config_for_function(optax.sgd)(learning_rate=functools.partial(os.system, 'touch {path}'))",
    "config_for_function(optax.sgd)(learning_rate=functools.partial(numpy.load, '{path}'))",
    'config_for_function(numpy.testing.runstring)(astr=\'open("{path}", "w")\', dict={{}})',
    "config_for_function(numpy.savetxt)(fname='{path}', X=[1])",
    "config_for_function(weft.config.get_named_trainer_config)(config_name='x', config_module='y')",
    "config_for_function(weft.config.text_parser.importlib.import_module)(name='antigravity')",
    "config_for_function(jax.debug.callback)(callback=os.system)",
    "config_for_class(weft.config.references.sys)()",
    "weft.config.Configurable.Config(klass=subprocess.Popen)",
    "weft.config.Configurable.Config(klass=numpy.memmap)",
    "weft.config.Configurable.Config(klass=int)",
    "subprocess.Popen.Config(args='touch {path}')",
    "os.Config()",
    "(lambda: open('{path}', 'w'))()",
    "[open('{path}', 'w') for x in [1]]",
    "{{'a': open('{path}', 'w')}}",
    'f\'{{open("{path}", "w")}}\'',
    "().__class__.__base__.__subclasses__()",
    "(x := open('{path}', 'w'))",
    "open('{path}', 'w') if True else None",
    "weft.config.ConfigBase(**{{'x': 1}})",
    "weft.config.ConfigBase(*[1])",
    "numpy.dtype(os)",
    "numpy.float32('__import__')",
    "set([1])",
    "complex('1')",
    "jax.sharding.PartitionSpec(3)",
    "functools.partial()",
    "functools.reduce(os.system, ['touch {path}'])",
    "{{**{{}}}}",
    "{{[]: 1}}",
    "{{[]}}",
    "not True",
    "~3",
    "-'a'",
    "1 + 1",
    "'a' * 1000000000",
    "3 < 4",
    "x[0]",
    "...",
    "1j",
    "lambda: 1",
    "await x",
    "unknown",
    "import os",
    "x = 1",
    "weft.config.ConfigBase(); 1",
    "",
    "(" * 1000,
    "[" * 150 + "]" * 150 + "x",
    "-" * 100_000 + "1",
    "a" + ".b" * 100_000,
    "1" * 100_000,
    "\0",
    "3",
    "config_for_function(optax.sgd, 1)(x=1)",
    "config_for_function('x')(x=1)",
    "config_for_something(optax.sgd)(x=1)",
    "f(1)(2)(3)",
    "weft.config.ConfigBase(x=1, x=2)",
    "{{1: 2, 1: 3}}",
    "unreadable('a lambda')",
    "unreadable('a class')(x=1)",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:50])
def test_hostile_texts(text, tmp_path):
    path = tmp_path / "touched"
    text = text.format(path=path) if len(text) < 500 else text
    before = set(sys.modules)
    with pytest.raises(ConfigTextError) as error:
        from_text(text)
    assert str(error.value).startswith("text")
    assert not path.exists()
    assert "antigravity" not in set(sys.modules) - before


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:50])
def test_hostile_values_in_a_config(text, tmp_path):
    path = tmp_path / "touched"
    text = text.format(path=path) if len(text) < 500 else text
    if text in ("3", ""):
        return
    with pytest.raises(ConfigTextError):
        from_text(f"{M}.Leaf.Config(value={text})")
    assert not path.exists()


# Error messages.


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("rte=1", UnknownFieldError, "cfg.txt:2: unknown field 'rte' in Leaf.Config. Did you mean"),
        ("rate='x'", ConfigTypeError, "cfg.txt:2: rate: Leaf.Config declares float there"),
        (
            "value=os.system",
            ConfigReferenceError,
            "cfg.txt:2: value: a text may not name 'os.system': it is neither listed in weft",
        ),
        (
            "value=optax.sgd()",
            ConfigReferenceError,
            "'optax.sgd' is not called by a text: it is neither a config class nor a record. "
            "Write config_for_function(optax.sgd)(…).",
        ),
        (
            "value={'a': [functools.partial(numpy.load)]}",
            ConfigReferenceError,
            "cfg.txt:2: value['a'][0]: a text may not name 'numpy.load' as a target of functools",
        ),
        (
            "value=weft.config.functions.FunctionConfigBase()",
            ConfigTextError,
            "write config_for_function(…)(…) or config_for_class(…)(…)",
        ),
        (
            "value=0x" + "f" * 4000,
            ConfigTextError,
            "a number has more than 14000 bits",
        ),
        (
            "value=weft.input.base.PathAndRank(path=1)",
            ConfigTextError,
            "these are not the fields of weft.input.base.PathAndRank. Give path, rank by name.",
        ),
        (
            "value=weft.input.base.PathAndRank(path=1, rnk=2)",
            ConfigTextError,
            "Did you mean 'rank'?",
        ),
        ("value=1 + 1", ConfigTextError, "cfg.txt:2: a config has no BinOp"),
        ("value=not 1", ConfigTextError, "only a number can have a sign"),
        ("value=1j", ConfigTextError, "cannot read 1j"),
        ("value={**{}}", ConfigTextError, "a config has no ** in a dict"),
        ("value={[]}", ConfigTextError, "cannot read this Set: unhashable type"),
        ("value=f().x", ConfigTextError, "a name is written with dots only"),
        (
            "value=f(1)()",
            ConfigTextError,
            "only config_for_function(…) and config_for_class(…) make a config",
        ),
        (
            "value=config_for_class(optax.sgd)()",
            ConfigError,
            "cfg.txt:2: config_for_class takes a class",
        ),
        (
            "value=weft.config.ConfigBase(1)",
            ConfigTextError,
            "the fields of a config are given by name, as dim=8",
        ),
        ("**{}", ConfigTextError, "a config has no **"),
        ("rate=1.0, rate=2.0", ConfigTextError, "a field is given twice"),
        ("value={1: 2, True: 3}", ConfigTextError, "cfg.txt:2: a key is given twice"),
        ("klass=int", ConfigReferenceError, "a text may not set 'klass' to this value"),
        ("value=complex(x=1)", ConfigTextError, "complex takes no names here"),
        ("value=numpy.float32(" + "9" * 400 + ")", ConfigTextError, "int too large to convert"),
        ("value=complex('1')", ConfigTextError, "complex does not take these values"),
        ("value=numpy.dtype('x')", ConfigTextError, "cfg.txt:2: data type 'x' not understood"),
        ("value=functools.partial()", ConfigTextError, "needs the name of a function"),
        (
            "value=unreadable('<lambda>')",
            UnreadableValueError,
            "cfg.txt:2: value: unreadable('<lambda>') is a value that only the program had "
            "that wrote this text. Set it in a program, or to the config of a function that makes "
            "it, as in value=config_for_function(my_module.function)().",
        ),
        ("value=", ConfigTextError, "cfg.txt:2: this is not a config text: "),  # Python's words
    ],
)
def test_error_names_the_line(body, kind, message):
    with pytest.raises(kind) as error:
        from_text(f"{M}.Leaf.Config(\n    {body},\n)", source="cfg.txt")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("unreadable('a table')", UnreadableValueError, "cfg:1: leaf.value: unreadable('a table')"),
        ("[1, unreadable('a table')]", UnreadableValueError, "leaf.value[1]: unreadable("),
        (
            "__main__.Net",
            ConfigReferenceError,
            "leaf.value: a text may not name '__main__.Net': it is defined in the program that "
            "wrote the text, and others cannot import it. Define it in a module of its own",
        ),
        ("os.system", ConfigReferenceError, "cfg:1: leaf.value: a text may not name 'os.system'"),
        ("config_for_function(os.system)(x=1)", ConfigReferenceError, "may not name 'os.system'"),
    ],
)
def test_values_that_cannot_be_read_are_kept_until_they_are_needed(value, kind, message):
    text = f"{M}.Tree.Config(leaf={M}.Leaf.Config(rate=0.5, value={value}))"
    with pytest.raises(kind):
        from_text(text)
    cfg = from_text(text, source="cfg", keep_unreadable=True)
    assert f"value={value}," in to_text(cfg)
    assert cfg.leaf.rate == 0.5
    assert cfg == from_text(to_text(cfg), keep_unreadable=True) == cfg.clone()
    for use in (cfg.leaf.instantiate, cfg.leaf.value):
        with pytest.raises(kind) as error:
            use()
        assert message in str(error.value)
    cfg.leaf.value = 3
    assert cfg.leaf.instantiate().config.value == 3


def test_only_values_that_cannot_be_read_are_kept():
    with pytest.raises(UnknownFieldError):
        from_text(f"{M}.Leaf.Config(rte=unreadable('x'))", keep_unreadable=True)
    with pytest.raises(ConfigReferenceError):
        from_text("unknown.Leaf.Config(rate=1)", keep_unreadable=True)


def test_nested_error_names_its_line_once():
    with pytest.raises(UnknownFieldError) as error:
        from_text(f"{M}.Tree.Config(\n many=[\n  {M}.Leaf.Config(\n   rte=1)])")
    assert str(error.value).startswith("text:4: unknown field 'rte'")


def test_non_configs_are_rejected():
    with pytest.raises(ConfigTextError, match="cfg holds a list, not a config"):
        from_text("[1]", source="cfg")


def test_partial_of_non_callable():
    text = f"{M}.Leaf.Config(value=functools.partial({M}.Colour.RED))"
    with pytest.raises(ConfigTextError, match=r"Colour\.RED cannot be called"):
        from_text(text, allow=(M,))


def test_hostile_name_in_loaded_module():
    assert sys.modules["os"] is os  # so the refusals above do not rest on its absence


def test_text_of_millions_of_values_is_refused():
    with pytest.raises(ConfigTextError, match=r"text has 6,000,002 characters; at most 1,048,576"):
        from_text("[" + "0," * 3_000_000 + "]")
    with pytest.raises(ConfigTextError, match=r"^a value has 6,000,002 characters"):
        read_value("[" + "0," * 3_000_000 + "]", source="")


def test_non_config_text():
    with pytest.raises(ConfigTextError, match="text: cannot read this as a config: "):
        from_text("-" * 100_000 + "1")


def test_key_without_a_text_is_named_by_its_class():
    with pytest.raises(ConfigTextError, match=r"\[LoRALinear\]: .*no_such_name"):
        from_text("{weft.nnx.nn.lora.LoRALinear(): weft.no_such_name}")
