import jax
import jax.numpy as jnp
import numpy as np

from weft.core import tables
from weft.core.meta import Partitioned


def test_values_by_shape():
    tree = {"x": np.ones((2, 3)), "key": jax.random.key(0), "n": 3}
    assert tables.abstract(tree)["x"] == jax.ShapeDtypeStruct((2, 3), np.float64)
    arrays, fill = tables.filled(tree)
    assert len(arrays) == 2 and fill(["k", "x"]) == {"key": "k", "x": "x", "n": 3}


def test_texts():
    x = jnp.ones((2, 3))
    assert tables.text({"a": {"b": x}, "c": []}) == "a:\n  b: float32[2,3]\nc: []"
    assert tables.text([x, [1, "a"]]) == "- float32[2,3]\n- - 1\n  - a"
    assert tables.text({"w": Partitioned(x, (None, "data"))}) == "w: float32[2,3] P(None, data)"
    assert tables.text(len) == "len" and tables.text({}) == "{}"
    assert tables.text_of_inputs((x,), {}) == "float32[2,3]"
    assert tables.text_of_inputs((x,), {"n": 1}) == "- float32[2,3]\n- n: 1"


def test_sizes():
    assert tables.size({"x": jnp.ones((500, 1)), "n": 3}) == "500 (2.0 KB)"
    assert tables.size(jax.random.key(0)) == "1 (8 B)" and tables.size([]) == "0 (0 B)"


def test_flops_of_a_function_and_of_its_gradient():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    n = jax.ShapeDtypeStruct((), jnp.int32)

    def product(x, n):
        return x @ x * n, "a", n

    forward = tables.flops(product, x, n)
    assert forward > 2 * 8**3 - 8 and tables.flops(product, x, n, with_vjp=True) > 2 * forward


def test_a_table():
    console = {"width": 40, "force_terminal": False}
    shown = tables.drawn(["a", "b"], [["[dim]1", "2"]], ["", "Total"], {"title": "T"}, {}, console)
    assert all(part in shown for part in ("[dim]1", "Total", " T "))
    assert "\x1b" not in shown and "\x1b" in tables.drawn(["a"], [["1"]], [""], {}, {}, None)
