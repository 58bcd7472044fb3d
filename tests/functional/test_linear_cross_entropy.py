import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from weft.errors import ArgumentValueError
from weft.functional import cap_logits, cross_entropy, linear_cross_entropy


def from_logits(x, weight, labels, *, bias=None, logit_cap=None, **kwargs):
    logits = jnp.dot(x, weight.T, preferred_element_type=jnp.float32)
    logits = logits if bias is None else logits + bias.reshape(*[1] * (x.ndim - 1), -1)
    logits = logits if logit_cap is None else cap_logits(logits, logit_cap)
    return cross_entropy(logits, labels, **kwargs)


def draw(seed, batch, classes, dtype=jnp.float32, dim=3):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(dtype))

    labels = jnp.array(rng.integers(-1, classes + 1, size=batch))
    arrays = {"x": normal(*batch, dim), "weight": normal(classes, dim), "bias": normal(classes)}
    probs = np.exp(rng.normal(size=(*batch, classes)).astype(np.float32))
    return arrays, labels, jnp.asarray(probs / probs.sum(-1, keepdims=True))


def graded(function, arrays, labels, **kwargs):
    """Returns the results, and gradients of a loss that uses what has gradients."""

    def loss(arrays):
        total, aux = function(**arrays, target_labels=labels, **kwargs)
        return total + 0.1 * aux["z_loss"] + jnp.sum(jnp.sin(aux["per_target_loss"])), aux

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)


def plain(x, weight, target_labels, **kwargs):
    return from_logits(x, weight, target_labels, **kwargs)


@hypothesis.settings(max_examples=6, deadline=None, phases=[hypothesis.Phase.generate])
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.sampled_from([(4,), (2, 3)]),
    shape=st.sampled_from([(10, 3, 1), (13, 4, 1), (12, 2, 3), (10, 2, 2)]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    with_bias=st.booleans(),
    soft=st.booleans(),
    logit_cap=st.sampled_from([None, 1.5]),
    z_loss_scale=st.sampled_from([0.0, 0.1]),
    label_smoothing=st.sampled_from([0.0, 0.2]),
    masked=st.booleans(),
)
def test_values_and_gradients_are_those_of_whole_logits(
    seed, batch, shape, dtype, with_bias, soft, masked, **options
):
    classes, chunk_size, num_shards = shape
    arrays, labels, probs = draw(seed, batch, classes, dtype)
    if not with_bias:
        del arrays["bias"]
    if soft:
        arrays["soft_target_labels"] = probs
    if masked:
        options["live_targets"] = jnp.asarray(np.arange(labels.size).reshape(labels.shape) % 3)
    chunked = functools.partial(linear_cross_entropy, chunk_size=chunk_size, num_shards=num_shards)
    ours = graded(chunked, arrays, labels, **options)
    expected = graded(plain, arrays, labels, **options)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (a, b)), rtol=tolerance, atol=tolerance
        ),
        ours,
        expected,
    )
    dtypes = [jax.tree.map(lambda a: a.dtype, results) for results in (ours, expected)]
    assert dtypes[0] == dtypes[1]


def test_first_of_equal_logits_is_the_likeliest():
    x, weight = jnp.ones((3, 1)), jnp.array([[0.0], [2.0], [1.0], [2.0]])
    attend = functools.partial(linear_cross_entropy, chunk_size=2)
    _, aux = jax.jit(attend)(x, weight, jnp.array([1, 1, 3]))
    assert aux["accuracy"] == pytest.approx(2 / 3)


def test_impossible_classes_have_no_gradient():
    arrays, labels, _ = draw(0, (4,), 6)
    arrays["bias"] = jnp.array([0.0, -jnp.inf] * 3)
    labels = jnp.array([0, 2, 4, -1])
    ours = graded(functools.partial(linear_cross_entropy, chunk_size=4), arrays, labels)
    expected = graded(plain, arrays, labels)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, expected
    )


def test_large_vocabularies_are_never_whole():
    x = jax.ShapeDtypeStruct((512, 8), jnp.float32)
    weight = jax.ShapeDtypeStruct((32_768, 8), jnp.float32)
    labels = jnp.zeros(512, jnp.int32)

    def temporary(function, soft=None):
        def loss(x, weight, soft):
            return function(x, weight, labels, soft_target_labels=soft)[0]

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, weight, soft).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(linear_cross_entropy) < temporary(from_logits) / 10

    soft = jax.ShapeDtypeStruct((512, 32_768), jnp.float32)
    assert temporary(linear_cross_entropy, soft) < temporary(from_logits, soft) / 10


def test_forward_mode_needs_whole_logits():
    arrays, labels, _ = draw(0, (4,), 6)

    def loss(x, **kwargs):
        return linear_cross_entropy(x, arrays["weight"], labels, **kwargs)[0]

    x = (arrays["x"],)
    whole = functools.partial(loss, chunk_size=6)
    _, slope = jax.jit(lambda x: jax.jvp(whole, x, x))(x)
    chunked = jax.jit(jax.grad(functools.partial(loss, chunk_size=2)))(*x)
    np.testing.assert_allclose(slope, jnp.sum(chunked * x[0]), rtol=1e-5)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(functools.partial(loss, chunk_size=2), x, x)


def test_devices_compute_with_their_own_classes():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    arrays, labels, _ = draw(0, (4, 2), 48, dim=5)
    shard = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))  # noqa: E731
    sharded = {
        "x": shard(arrays["x"], "data"),
        "weight": shard(arrays["weight"], "model"),
        "bias": shard(arrays["bias"], "model"),
    }
    function = functools.partial(linear_cross_entropy, chunk_size=3, num_shards=4)
    step = jax.jit(functools.partial(graded, function))
    compiled = step.lower(sharded, shard(labels, "data")).compile()
    ours, expected = compiled(sharded, shard(labels, "data")), graded(plain, arrays, labels)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, expected
    )
    text = compiled.as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    bodies = re.findall(r"body=%([\w.-]+)", text)
    assert len(bodies) == 2
    for body in bodies:
        (computation,) = re.findall(rf"^%{re.escape(body)} .*?^}}", text, re.DOTALL | re.MULTILINE)
        assert "dot" in computation
        # The weight's gradient is added up over the data; nothing is over the classes.
        assert not re.search(r"replica_groups=\{\{0,1", computation)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 4}, "num_shards=4 does not divide the 6 classes"),
        ({"chunk_size": 0}, "chunk_size=0 must be positive"),
        ({"label_smoothing": 2.0}, "linear_cross_entropy got label_smoothing=2.0"),
    ],
)
def test_options_are_checked(options, message):
    arrays, labels, _ = draw(0, (4,), 6)
    with pytest.raises(ArgumentValueError, match=message):
        linear_cross_entropy(**arrays, target_labels=labels, **options)
