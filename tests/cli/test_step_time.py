import pytest

from weft.cli.collectives import Collective
from weft.cli.step_time import predict
from weft.trainer.device_specs import DEVICE_SPECS, device_spec_of

MESH = {"data": 2, "model": 8}
WITHIN = (tuple(range(8)), tuple(range(8, 16)))
ACROSS = tuple((i, i + 8) for i in range(8))


def collective(kind, groups, times=1):
    return Collective(kind, ("f32[25]",), 10**9, times, in_loop=False, groups=groups)


def predicted(*collectives, device="H100", memory_traffic=0.0, flops=989e12 * 16, **kwargs):
    return predict(
        DEVICE_SPECS[device],
        flops=flops,
        model_flops=0.75 * flops,
        memory_traffic=memory_traffic,
        collectives=collectives,
        mesh_shape=MESH,
        num_devices=16,
        **kwargs,
    )


def test_compute_and_memory_overlap_and_collectives_do_not():
    step = predicted(collective("all-gather", WITHIN, times=4), memory_traffic=1.675e12)
    assert (step.compute, step.memory) == (1.0, 0.5)
    assert step.collectives == {"model": pytest.approx(4e9 * 7 / 8 / 450e9)}
    assert step.total == pytest.approx(1.0 + 3.5 / 450)
    assert step.mfu == pytest.approx(0.75 / step.total)
    assert step.limit() == "compute"
    assert "devices are busy" in step.advice()


def test_links_of_a_node_are_faster_than_the_network():
    step = predicted(collective("all-reduce", ACROSS), flops=1e6)
    assert step.collectives == {"data": pytest.approx(2 * 1e9 / 2 / 50e9)}
    assert step.limit() == "collectives"
    assert step.advice().startswith("Collectives over data take longest")
    # All eight devices of a node take part, each with its own network card.
    everywhere = predicted(collective("all-gather", (tuple(range(16)),)), flops=1e6)
    assert everywhere.collectives == {"data × model": pytest.approx(1e9 * 15 / 16 / 400e9)}


def test_permutations_and_slices_of_tpus():
    pairs = tuple((i, (i + 8) % 16) for i in range(16))
    for num_slices, bandwidth in ((1, 200e9), (2, 6.25e9)):
        step = predicted(
            collective("collective-permute", pairs), device="v5p", num_slices=num_slices
        )
        assert step.collectives == {"data": pytest.approx(1e9 / bandwidth)}


def test_memory_may_take_longest():
    step = predicted(memory_traffic=33.5e12)
    assert (step.limit(), step.total) == ("memory", 10.0)
    assert "More rows" in step.advice()


def test_devices_are_known_by_their_kind():
    kinds = {"NVIDIA H100 80GB HBM3": "H100", "TPU v5": "v5p", "TPU v5 lite": "v5e"}
    for kind, name in kinds.items():
        assert device_spec_of(kind) is DEVICE_SPECS[name]
    assert device_spec_of("cpu") is None
