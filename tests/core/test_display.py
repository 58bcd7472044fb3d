import jax
import jax.numpy as jnp

from weft.core import display
from weft.core.meta import Partitioned


def test_texts():
    x = jnp.ones((2, 3))
    assert display.format_tree({"a": {"b": x}, "c": []}) == "a:\n  b: float32[2,3]\nc: []"
    assert display.format_tree([x, [1, "a"]]) == "- float32[2,3]\n- - 1\n  - a"
    assert (
        display.format_tree({"w": Partitioned(x, (None, "data"))})
        == "w: float32[2,3] P(None, data)"
    )
    assert display.format_tree(len) == "len" and display.format_tree({}) == "{}"
    assert display.format_inputs((x,), {}) == "float32[2,3]"
    assert display.format_inputs((x,), {"n": 1}) == "- float32[2,3]\n- n: 1"


def test_flops_of_a_function_and_of_its_gradient():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    n = jax.ShapeDtypeStruct((), jnp.int32)

    def product(x, n):
        return x @ x * n, "a", n

    forward = display.flops(product, x, n)
    assert forward > 2 * 8**3 - 8 and display.flops(product, x, n, with_vjp=True) > 2 * forward


def test_table():
    console = {"width": 40, "force_terminal": False}
    variables = {"params": {"w": jnp.ones((4, 2))}}
    rows = [["[dim]1", "2", ""]]
    shown = display.render_table("model", ["a", "b"], variables, rows, {}, {}, console)
    parts = ("[dim]1", "Total", " str Summary", "Parameters: 8 (32 B)")
    assert all(part in shown for part in parts)
    titled = display.render_table("model", ["a"], {}, [["1"]], {"title": "T"}, {}, None)
    assert "\x1b" not in shown and "\x1b" in titled and "Summary" not in titled
