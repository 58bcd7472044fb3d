"""The text of a config: `from_text` reads it, or raises a ConfigError; it imports and runs nothing.

A config that was read is written and read again, and must be equal.
"""

import sys

import hypothesis.strategies as st

from tests.fuzz.readers import any_of, read, source_of
from weft.config import ConfigError, from_text, to_text
from weft.config.references import ENUMS, RECORDS, TARGETS, VALUES
from weft.recipes.lm import lm_tiny

_TEXTS = [
    to_text(lm_tiny(), omit_defaults=True),
    "config_for_function(optax.adamw)(\n    learning_rate=config_for_function("
    "optax.constant_schedule)(value=0.1),\n    mask={'a': [True, None], (1, 'b'): -2.5},\n)",
    "weft.hierarchy.layers.linear.Linear.Config(input_dim=2, output_dim=0x10, bias=False, "
    "name='é\\n')",
    "weft.trainer.trainer.SpmdTrainer.Config(dir='runs/x', mesh_axis_names=('data',), "
    "mesh_shape=weft.trainer.mesh.HybridMeshShape(ici_mesh_shape=(1,), dcn_mesh_shape=(1,)))",
    "weft.hierarchy.base_layer.BaseLayer.Config(dtype=jax.numpy.bfloat16, "
    "param_partition_spec=jax.sharding.PartitionSpec('data', None), vlog=1)",
    "config_for_function(jax.nn.initializers.normal)(dtype=numpy.dtype('bfloat16'), "
    "stddev=numpy.float32(0.5))",
    "config_for_class(weft.linen.linear.Dense)(features=3, precision=jax.lax.Precision.HIGHEST, "
    "bias_init=functools.partial(jax.nn.initializers.constant, 0.5), name='x')",
]
VALID = [text.encode() for text in _TEXTS]

_NAMES = st.sampled_from(
    [
        *sorted(VALUES | TARGETS | RECORDS | ENUMS)[::12],
        *("numpy.load", "os.system", "weft", "weft.trainer", "weft.launch.local.LocalJob", "a.b"),
        *("antigravity.x", "weft.config.ConfigBase", "weft.config.functions.CallConfig", "int"),
        *(
            "weft.hierarchy.layers.linear.Linear",
            "weft.trainer.summary_writer.trackers.WandBWriter",
            "REQUIRED",
        ),
        *("functools.partial", "config_for_function", "numpy.dtype", "__import__", "x.__class__"),
    ]
)
_LITERALS = st.one_of(
    st.sampled_from(["None", "True", "1e999", "0xff", "-1", "''", "b''", "()", "...", "1j", "{}"]),
    st.integers().map(repr),
    st.floats().map(repr),
    st.text(max_size=8).map(repr),
    st.binary(max_size=4).map(repr),
)
_FIELDS = st.sampled_from(["learning_rate", "dim", "x", "klass", "fn", "name", "dir", "value"])


def _expressions(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    items = st.lists(inner, max_size=3).map(", ".join)
    fields = st.lists(st.tuples(_FIELDS, inner), max_size=3).map(
        lambda pairs: ", ".join(f"{name}={value}" for name, value in pairs)
    )
    return st.one_of(
        items.map("[{}]".format),
        items.map("({},)".format),
        items.map("{{{}}}".format),
        st.tuples(inner, inner).map(lambda pair: "{{{}: {}}}".format(*pair)),
        st.tuples(_NAMES, items).map(lambda call: "{}({})".format(*call)),
        st.tuples(_NAMES, fields).map(lambda call: "{}({})".format(*call)),
        st.tuples(_NAMES, fields).map(lambda call: "{}.Config({})".format(*call)),
        st.tuples(_NAMES, fields).map(lambda call: "config_for_function({})({})".format(*call)),
        st.tuples(_NAMES, fields).map(lambda call: "config_for_class({})({})".format(*call)),
        st.tuples(_NAMES, items).map(lambda call: "functools.partial({}, {})".format(*call)),
        st.tuples(inner, inner).map(" + ".join),
        inner.map("-{}".format),
        inner.map("lambda: {}".format),
    )


_EXPRESSIONS = st.recursive(_NAMES | _LITERALS, _expressions, max_leaves=12).map(
    lambda text: text.encode("utf-8", "surrogatepass")
)
CRAFTED = [
    *(bytes(1), b"", b"\xff", b"(" * 5_000, b"[" * 90 + b"]" * 90, b"-" * 50_000 + b"1"),
    *(b"a" + b".b" * 50_000, b"1" * 5_000, b"0x" + b"f" * 10_000, b"1" + b"+1" * 20_000),
    *(b"config_for_function(optax.sgd)(learning_rate=" * 80 + b"1" + b")" * 80,),
    *(b"'" + b"\\N{DIGIT ONE}" * 500 + b"'", b"{1: 2, True: 3}", b"{'a': 1, 'a': 2}"),
    *(b"weft.config.ConfigBase(" + b"x=1, " * 2_000 + b")", b"numpy.dtype('O,' * 3)"),
    *(b"numpy.dtype('" + b"f4," * 5_000 + b"')", b"numpy.dtype('f4(2147483647,9)')"),
    *(b"numpy.dtype('V99999999999')", b"numpy.float32(" + b"9" * 400 + b")", b"set({1})"),
]
_NEVER_IMPORTED = ("antigravity", "wandb", "mlflow", "weft.launch", "weft.cli")
CASES = any_of(VALID, CRAFTED) | _EXPRESSIONS
SHORT = 100


def check(case: bytes) -> None:
    try:
        text = case.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return
    before = set(sys.modules)
    returned, config = read(lambda: from_text(text), ConfigError)
    news = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not news & {"antigravity", "os", "subprocess", "wandb", "mlflow"}, news
    assert not any(
        name.startswith(("weft.launch", "weft.cli")) for name in set(sys.modules) - before
    )
    if returned:
        written = to_text(config)
        # A default of a function may be an object that has no name.
        assert "unreadable(" in written or from_text(written) == config
    assert returned or case not in VALID, config


def source(case: bytes) -> str:
    return source_of("fuzz_config_text", case)
