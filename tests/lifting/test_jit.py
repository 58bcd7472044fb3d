import jax
import jax.numpy as jnp
import numpy as np

from tests.lifting.counting import BOXES, Box
from weft.lifting import jit
from weft.lifting.jit import Compiled, Lowered, Traced


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


def test_compiled_function_accepts_carriers():
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


def doubled(compiled, args, kwargs):
    return 2 * compiled(*args, **kwargs)


def test_stages_have_the_interface_of_jax():
    traced = Traced(jax.jit(jnp.sin).trace(jnp.float32(0)), doubled)
    lowered = traced.lower()
    compiled = lowered.compile()
    assert isinstance(lowered, Lowered) and "stablehlo.sine" in lowered.as_text()
    assert isinstance(compiled, Compiled) and "HloModule" in compiled.as_text()
    assert compiled(jnp.float32(1)) == 2 * jnp.sin(1.0)
    assert repr(compiled).startswith("Compiled(")
    assert not hasattr(compiled, "_missing") and not hasattr(compiled, "missing")


def test_explain_recompile():
    f = jit(BOXES, lambda box, x, **kwargs: x, static_argnames="mode")
    box = Box(x=jnp.ones(2))
    assert "traced not yet" in f.explain_recompile()
    f(box, jnp.ones(3))
    f(box, jnp.ones(3))
    assert "traced once, so nothing was compiled again" in f.explain_recompile()
    f(box, jnp.ones(4))
    assert "float32[3] before, float32[4]" in f.explain_recompile()
    f(Box(x=jnp.ones(2), y=jnp.ones(1)), jnp.ones(4))
    assert "not there before, float32[1]" in f.explain_recompile()
    f(box, jnp.ones(4), mode="fast")
    f(box, jnp.ones(4), mode="slow")
    assert "fast" in f.explain_recompile()
    assert "slow" in f.explain_recompile()
