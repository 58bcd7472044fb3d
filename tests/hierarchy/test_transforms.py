import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError, OutputConflictError
from weft.hierarchy import transforms
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.module import Module, functional, scan_in_context


class Child(Module):
    def forward(self, x, scale=1.0):
        y = jnp.sin(x * self.state["w"]) * scale
        self.add_summary("mean", y.mean())
        self.add_summary("weighted", WeightedScalar(y.mean(), 1.0))
        self.add_state_update("w", self.state["w"] + 1)
        self.add_module_output("y", y)
        self.add_summary("key", self.prng_key)
        return y


class Root(Module):
    """Runs the function `body` of its child in its own context."""

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("child", Child.default_config())

    def forward(self, body):
        return body(self.child)


def run(body, state=None, **kwargs):
    root = Root.default_config().set(name="root").instantiate(parent=None)
    state = {"child": {"w": jnp.float32(0.5)}} if state is None else state
    return functional(root, jax.random.PRNGKey(0), state, (body,), is_training=True, **kwargs)


@pytest.mark.parametrize(
    "name", ["vmap", "jit", "checkify", "value_and_grad", "grad", "custom_vjp", "custom_jvp"]
)
def test_transformed_function_keeps_name_and_argument_names(name):
    def loss(state, batch):
        return state

    made = getattr(transforms, name)(*[loss] * {"custom_vjp": 3, "custom_jvp": 2}.get(name, 1))
    assert made.__name__ == "loss"
    assert list(inspect.signature(made).parameters) == ["state", "batch"]


def test_scan_of_states_and_keys():
    w, keys = jnp.array([0.5, 2.0]), jax.random.split(jax.random.PRNGKey(1))
    xs = {"x": jnp.array([1.0, 2.0]), "state": {"child": {"w": w}}, "prng_key": keys}
    (_, ys), outputs = run(
        lambda child: scan_in_context(lambda c, x: (c, child(x)), carry=None, xs=xs),
        drop_output_collections=(),
    )
    np.testing.assert_allclose(ys, np.sin([0.5, 4.0]), rtol=1e-6)
    assert list(outputs.module_outputs) == ["iter"]
    np.testing.assert_array_equal(outputs.state_updates["child"]["w"], w + 1)
    keys = [outputs.summaries[f"iter{i}"]["child"]["key"].tolist() for i in range(2)]
    assert keys[0] != keys[1]
    with pytest.raises(ArgumentValueError, match=r"has 'x' and \['y'\].*Write `xs={'xs': xs}`"):
        run(lambda child: scan_in_context(lambda c, x: (c, x), carry=None, xs={**xs, "y": w}))


def test_iteration_summaries_merge_and_outputs_drop():
    _, outputs = run(
        lambda child: scan_in_context(
            lambda c, x: (c, child(x)),
            carry=None,
            xs=jnp.arange(3.0),
            merge_summaries=True,
            drop_output=lambda path: path.startswith(("module_outputs", "summaries/child/key")),
        ),
        drop_output_collections=(),
    )
    means = np.sin(np.arange(3) * 0.5)
    merged = outputs.summaries["iter"]["child"]
    assert set(merged) == {"mean", "weighted"}
    np.testing.assert_allclose(merged["mean"], means.mean(), rtol=1e-6)
    np.testing.assert_allclose(merged["weighted"].mean, means.mean(), rtol=1e-6)
    assert merged["weighted"].weight == 3
    assert outputs.module_outputs == {}


def test_loops_with_one_prefix_do_not_overwrite_outputs():
    def two_loops(second_prefix):
        def body(child):
            for prefix in ("iter", second_prefix):
                scan_in_context(
                    lambda c, x: (c, child(x)),
                    carry=None,
                    xs=jnp.arange(2.0),
                    child_name_prefix=prefix,
                    drop_output=lambda path: path.startswith("state_updates"),
                )

        return run(body, drop_output_collections=())[1]

    assert list(two_loops("other").module_outputs) == ["iter", "other"]
    with pytest.raises(OutputConflictError, match=r"add the output 'module_outputs/iter/child/y'"):
        two_loops("iter")


@pytest.mark.parametrize("depth", range(1, 7))
def test_body_in_scans_is_traced_once(depth):
    traces = []

    def nested(child, x, depth=depth):
        if depth == 0:
            traces.append(1)
            return child(x)
        body = lambda x, _: (nested(child, x, depth - 1), None)  # noqa: E731
        return scan_in_context(body, carry=x, xs=jnp.arange(2))[0]

    jax.eval_shape(lambda x: run(lambda child: nested(child, x)), jnp.float32(1))
    assert len(traces) == 1
