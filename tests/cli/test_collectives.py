import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from weft.cli.collectives import collectives_of

MESH = {"data": 2, "model": 4}


def compiled(fn, *args_and_specs, shape=(2, 4)):
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices; WEFT_TEST_DEVICES gives {jax.device_count()}")
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    args = [
        jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for dims, spec in args_and_specs
    ]
    with jax.set_mesh(mesh):
        return jax.jit(fn).lower(*args).compile().as_text() or ""


def test_kinds_sizes_and_mesh_axes():
    def fn(x, w):
        rows = jax.lax.with_sharding_constraint(x, PartitionSpec(None, None))
        return rows.sum(axis=0), (x @ w).sum()

    found = collectives_of(compiled(fn, ((8, 16), ("model",)), ((16, 4), (None, None))))
    kinds = {(c.kind, c.axes(MESH)) for c in found}
    assert kinds <= {("all-gather", ("model",)), ("all-reduce", ("model",))}
    by_kind = {c.kind: c for c in found}
    assert not any(c.in_loop for c in found)
    assert by_kind["all-reduce"].bytes in (4, 64, 68)


def test_collective_in_loop_is_multiplied_by_iterations():
    def fn(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    text = compiled(fn, ((5, 16, 16), (None, "model")), ((4, 16), ("data",)))
    (found,) = [c for c in collectives_of(text) if c.kind in ("all-gather", "all-reduce")]
    assert found.times == 5
    assert found.in_loop
    assert found.axes(MESH) == ("model",)


HLO = """\
HloModule step, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %s = f32[] add(%x, %x)
}

%counted (i: (s32[])) -> pred[] {
  %l = s32[]{:T(128)} constant(7)
  ROOT %c = pred[]{:T(512)} compare(%i, %l), direction=LT
}

%body (p: (f32[4,8])) -> (f32[4,8]) {
  %p = (f32[4,8]{1,0}) parameter(0)
  %g = bf16[32,8]{1,0} all-gather(%v), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %r = f32[4,8]{1,0} reduce-scatter(%v), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  ROOT %t = (f32[4,8]{1,0}) tuple(%r)
}

%other (p: f32[4]) -> f32[4] {
  ROOT %c = f32[4]{0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
}

ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %w = (f32[4,8]{1,0}) while(%a), condition=%cond, body=%body, known_trip_count":{"n":"12"}
  %u = (f32[4,8]{1,0}) while(%a), condition=%cond, body=%body
  %x = (f32[4,8]{1,0}) while(%a), condition=%counted, body=%body
  %o = f32[4]{0} conditional(%i), branch_computations={%other, %other}
  %s = (f32[2,8], f32[4,8]) all-gather-start(%v), replica_groups=[4,2]<=[2,4]T(1,0)
  %d = f32[4,8]{1,0} all-gather-done(%s)
  %v = (f32[9], f32[9], u32[], u32[]) collective-permute-start(%v), source_target_pairs={{0,4}}
  %b = ((s8[4], s8[2]), (s8[8], s8[4])) all-gather-start(%v), replica_groups=[4,2]<=[2,4]T(1,0)
  %m = (pred[], s4[3]{0}) all-reduce(%q, %z), replica_groups=mesh['a'=2,'b'=4] {'a','b'}
  %n = f32[] all-reduce(%q), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}
  %k = f32[] all-reduce(%q), replica_groups=mesh['a'=8] {'a':(2)2}
  %h = f32[] all-reduce(%q), replica_groups=mesh['a'=2,'b'=2], device_ids=(0,1,4,5) {'b'}
  ROOT %e = f32[4,8]{1,0} copy(%d)
}
"""


def test_group_and_call_formats():
    found = collectives_of(HLO)
    shown = [(c.kind, c.shapes, c.bytes, c.times, c.in_loop, c.axes(MESH)) for c in found]
    assert shown == [
        ("all-gather", ("bf16[32,8]",), 512, 20, True, ("model",)),
        ("reduce-scatter", ("f32[4,8]",), 256, 20, True, ("data",)),
        ("collective-permute", ("f32[4]",), 16, 2, False, ("model",)),
        ("all-gather", ("f32[4,8]",), 128, 1, False, ("data",)),
        ("collective-permute", ("f32[9]",), 36, 1, False, ("data",)),
        ("all-gather", ("s8[8]", "s8[4]"), 12, 1, False, ("data",)),
        ("all-reduce", ("pred[]", "s4[3]"), 3, 1, False, ("data", "model")),
        ("all-reduce", ("f32[]",), 4, 1, False, ("data",)),
        ("all-reduce", ("f32[]",), 4, 1, False, None),
        ("all-reduce", ("f32[]",), 4, 1, False, None),
    ]
    assert found[-2].groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert found[-1].groups == ((0, 1), (4, 5))


OF_TPU = """\
%all-reduce-scatter.1 (input.1: f32[8,4]) -> f32[4,4] {
  %input.1 = f32[8,4]{1,0:T(8,128)} parameter(0)
  %all-reduce.9 = f32[8,4]{1,0:T(8,128)} all-reduce(%input.1), replica_groups={{0,1}}, to_apply=%add
  ROOT %s = f32[4,4]{1,0:T(8,128)} dynamic-slice(%all-reduce.9, %i), dynamic_slice_sizes={4,4}
}

ENTRY %main (p: f32[8,4]) -> f32[4,4] {
  %p = f32[8,4]{1,0:T(8,128)} parameter(0)
  ROOT %f = f32[4,4]{1,0:T(8,128)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_reduce_scatter_of_tpus():
    (found,) = collectives_of(OF_TPU)
    assert (found.kind, found.bytes, found.times) == ("reduce-scatter", 8 * 4 * 4, 1)


def test_program_without_collectives():
    assert (
        collectives_of("HloModule f\n\nENTRY %main () -> f32[] {\n  ROOT %c = f32[] x()\n}") == []
    )
