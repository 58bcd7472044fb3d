"""What Flax deprecates: the same uses warn in Flax and in Weft."""

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
    "paths": lambda of: of("traverse_util").path_aware_map(lambda path, x: x, {"a": X}),
}


@pytest.mark.parametrize("use", CURRENT)
@pytest.mark.parametrize("library", ["flax", "weft"])
def test_other_uses(library, use):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CURRENT[use](modules(library))
