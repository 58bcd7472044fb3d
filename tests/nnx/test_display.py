import sys
import types

import jax.numpy as jnp
import treescope

from weft import nnx


class Block(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((3, 4)), tag="a")
        self.stat = nnx.BatchStat(jnp.zeros(2))
        self.name = "block"


def test_objects_show_their_attributes_and_sizes():
    assert repr(Block()) == (
        "Block( # BatchStat: 2 (8 B), Param: 12 (48 B), Total: 14 (56 B)\n"
        "  w=Param( # 12 (48 B)\n"
        "    value=Array(shape=(3, 4), dtype=float32),\n"
        "    tag='a'\n"
        "  ),\n"
        "  stat=BatchStat( # 2 (8 B)\n"
        "    value=Array([0., 0.], dtype=float32)\n"
        "  ),\n"
        "  name='block'\n"
        ")"
    )
    assert repr(nnx.Param(jnp.ones((1000, 1000)))).startswith("Param( # 1,000,000 (4.0 MB)")


def test_containers_and_states():
    assert repr(nnx.List([1])) == "List([\n  1\n])" and repr(nnx.List()) == "List([])"
    assert repr(nnx.Dict(a=1)) == "Dict({\n  'a': 1\n})"
    assert repr(nnx.State({"a": {"b": 1}})) == "State({\n  'a': State({\n    'b': 1\n  })\n})"


def test_cycle_is_not_followed():
    block = Block()
    block.me = block
    assert "me=Block(...)" in repr(block)


def test_display_uses_treescope_in_a_notebook(monkeypatch, capsys):
    shown = []
    notebook = types.SimpleNamespace(get_ipython=object)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "treescope", types.SimpleNamespace(display=shown.append))
    nnx.display(3)
    assert shown == [3]
    monkeypatch.setitem(sys.modules, "treescope", None)
    nnx.display(4)
    assert capsys.readouterr().out == "4\n"


def test_treescope_draws_objects_as_trees():
    text = treescope.render_to_text(Block())
    assert "stat=BatchStat(value=<jax.Array([0., 0.], dtype=float32)>)" in text
    assert "tag='a'" in text and "name='block'" in text
    text = treescope.render_to_text(nnx.state(Block()))
    assert text.startswith("State({") and "'w': Param(" in text
    cycle = nnx.Dict(x=1)
    cycle.me = cycle
    assert "cyclic" in treescope.render_to_text(cycle).lower()
