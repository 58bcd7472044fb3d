import jax

from weft import nnx


def test_an_initializer_says_more_of_its_value():
    ones = nnx.with_metadata(
        jax.nn.initializers.ones, tag="head", on_get_value=lambda variable, value: value + 1
    )
    w = nnx.Param(ones(jax.random.key(0), (2,)), tag="other", scale=3)
    assert w.tag == "head" and w.scale == 3
    assert w[...].tolist() == [2, 2] and w.get_raw_value().tolist() == [1, 1]
    assert ones.__name__ == jax.nn.initializers.ones.__name__


def test_it_is_a_value_of_its_own():
    made = nnx.VariableMetadata(1, metadata={"a": 2})
    assert made == nnx.VariableMetadata(1, metadata={"a": 2}) and made.entries() == {"a": 2}
    assert nnx.Variable(made).get_metadata() == {"a": 2}
