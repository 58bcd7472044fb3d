"""What Flax deprecates: the same uses warn in Flax and in Weft."""

import functools
import importlib
import warnings

import jax
import jax.numpy as jnp
import pytest

from tests.keys import draw

X = draw(1, 1, 3, 4)
KEY = jax.random.key(0)


def modules(library):
    def find(name):
        return importlib.import_module(f"{library}.{name}")

    return find


OLD_USES_OF_NNX = (
    *("w.value", "setattr(w, 'value', X)", "w.raw_value", "setattr(w, 'raw_value', X)"),
    *("w.sharding_names", "nnx.Param(X, sharding=None)", "nnx.Param(X, sharding_names=None)"),
    "nnx.Param(nnx.with_metadata(lambda: X, sharding=None)())",
    "nnx.Linear(1, 1, rngs=nnx.Rngs(0), kernel_metadata={'sharding': None})",
    *("w.set_metadata(sharding=None)", "w.set_metadata('sharding_names', None)"),
    *("nnx.VariableState", "nnx.pure(state)", "nnx.vars_as(net)"),
    *("list(net.iter_modules())", "list(net.iter_children())"),
    *("nnx.Rngs(0).fork(split=2)", "nnx.Rngs(0).params.fork(split=2)"),
    *("state.flat_state()", "state.to_pure_dict()", "state.replace_by_pure_dict({'w': X})"),
    *("state.split(...)", "state.filter(...)", "state.merge(state)", "state - state"),
    *("state.map(lambda _, x: x)", "nnx.State.from_flat_path({('a',): 1})"),
)
CURRENT_USES_OF_NNX = (
    *("w[...]", "w.get_value()", "w.set_value(X)", "w.set_raw_value(w.get_raw_value())"),
    *("nnx.Param(X, out_sharding=None).out_sharding", "w.set_metadata(out_sharding=None)"),
    *("nnx.as_pure(state)", "nnx.with_vars(net)", "nnx.Rngs(0).fork()", "nnx.Rngs(0).split(2)"),
    *("list(nnx.iter_modules(net))", "list(nnx.iter_children(net))"),
    *("nnx.to_flat_state(state)", "nnx.replace_by_pure_dict(state, nnx.to_pure_dict(state))"),
    *("nnx.split_state(state, ...)", "nnx.merge_state(state, state)", "state | state"),
    *("nnx.fork_rngs(nnx.Rngs(0))", "nnx.split_rngs(nnx.Rngs(0), splits=2)", "repr(net)"),
)


def use_of_nnx(text, of):
    nnx = of("nnx")
    net = nnx.Dict(w=nnx.Param(X), of_net=nnx.Dict(b=nnx.BatchStat(X)))
    names = {"nnx": nnx, "net": net, "w": net.w, "state": nnx.state(net), "X": X}
    eval(compile(text, __file__, "eval"), names)


USES = {
    "SelfAttention": lambda of: of("linen").init(
        lambda layer, x: layer(x), of("linen").SelfAttention(2)
    )(KEY, X),
    "inputs_kv": lambda of: of("linen").init(
        lambda layer, x: layer(x, inputs_kv=x), of("linen").MultiHeadAttention(2)
    )(KEY, X),
    "Traversal": lambda of: of("traverse_util").TraverseId(),
    "ModelParamTraversal": lambda of: of("traverse_util").ModelParamTraversal(lambda *_: True),
    "pmean": lambda of: jax.vmap(lambda x: of("jax_utils").pmean(x, "i"), axis_name="i")(X),
    **{text: functools.partial(use_of_nnx, text) for text in OLD_USES_OF_NNX},
    "PrefetchIterator": lambda of: list(
        of("training.prefetch_iterator").PrefetchIterator(iter(range(3)))
    ),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("library", ["flax", "weft"])
def test_deprecated_uses(library, use):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        USES[use](modules(library))
    shown = {(warning.category, str(warning.message)) for warning in seen}
    assert [category for category, _ in shown] == [DeprecationWarning]
    if library == "weft":
        assert {warning.filename for warning in seen} == {__file__}
        assert all("is deprecated, as in Flax: " in message for _, message in shown)


CURRENT = {
    "attention": lambda of: of("linen").MultiHeadDotProductAttention(2).init(KEY, X, X, X),
    "attention to itself": lambda of: of("linen").MultiHeadAttention(2).init(KEY, X),
    "a constant traversal": lambda of: of("traverse_util").t_identity.update(jnp.sin, X),
    **{text: functools.partial(use_of_nnx, text) for text in CURRENT_USES_OF_NNX},
    "paths": lambda of: of("traverse_util").path_aware_map(lambda path, x: x, {"a": X}),
}


@pytest.mark.parametrize("use", CURRENT)
@pytest.mark.parametrize("library", ["flax", "weft"])
def test_other_uses(library, use):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CURRENT[use](modules(library))


def test_a_warning_is_shown_once_for_each_line():
    program = """
from weft import nnx
w = nnx.Param(1)
for _ in range(2):
    w.value
w.value = 2
"""
    names = {"__name__": "__main__"}
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
        exec(compile(program, "program.py", "exec"), names)
    assert [(warning.filename, warning.lineno) for warning in seen] == [
        ("program.py", 5),
        ("program.py", 6),
    ]
    assert [str(warning.message) for warning in seen] == [
        ".value is deprecated, as in Flax: read variable[...], or variable.get_value().",
        "setting .value is deprecated, as in Flax: set variable[...], or call "
        "variable.set_value(value).",
    ]
