import jax
import jax.numpy as jnp
import numpy as np

from tests.lifting.counting import BOXES, Box
from weft.lifting import jit


def counting_jit(**kwargs):
    traces = []

    def fn(box, x):
        traces.append(1)
        box.write("total", box.arrays["total"] + x)
        return box.arrays["total"] * 2

    return jit(BOXES, fn, **kwargs), traces


def test_equal_structure_is_compiled_once():
    fn, traces = counting_jit()
    for _ in range(3):
        box = Box(total=jnp.float32(1))
        assert fn(box, jnp.float32(2)) == 6
        assert box.arrays["total"] == 3
        assert box.writes == 1
    assert len(traces) == 1
    fn(Box(total=jnp.float32(0), more=jnp.float32(0)), jnp.float32(1))
    assert len(traces) == 2


def test_lower_leaves_the_carrier_alone():
    fn, _ = counting_jit()
    box = Box(total=jnp.float32(1))
    assert "stablehlo.add" in fn.lower(box, jnp.float32(2)).as_text()
    assert box.arrays["total"] == 1
    assert box.writes == 0


def test_what_was_compiled_ahead_is_called_with_carriers():
    fn, traces = counting_jit()
    compiled = fn.lower(Box(total=jnp.float32(0)), jnp.float32(0)).compile()
    box = Box(total=jnp.float32(1))
    assert compiled(box, jnp.float32(2)) == 6
    assert box.arrays["total"] == 3
    assert len(traces) == 1
    assert "HloModule" in compiled.as_text()


def test_donation_takes_the_carriers_arrays():
    fn, _ = counting_jit(donate_argnums=0)
    before = jnp.ones(4)
    box = Box(total=before)
    fn(box, jnp.ones(4))
    assert before.is_deleted()
    np.testing.assert_array_equal(box.arrays["total"], 2 * np.ones(4))


def test_shardings_follow_the_users_tree():
    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    fn = jit(
        BOXES, lambda batch: {"y": batch["x"] + 1}, in_shardings=({"x": rows},), out_shardings=rows
    )
    out = fn({"x": jnp.zeros(16)})
    assert out["y"].sharding.is_equivalent_to(rows, 1)
