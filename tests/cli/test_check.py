import os
import types
from typing import Any

import jax
import pytest

from tests.weft_process import finish, weft_processes
from weft.cli import check, main
from weft.cli.check import _shape_of_program
from weft.trainer import SpmdTrainer
from weft.trainer.device_specs import DEVICE_SPECS

needs_eight = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
TINY = ["model.decoder.transformer.num_layers=1", "input.source.sequence_length=16"]


@needs_eight
@pytest.mark.long
def test_valid_recipe(capsys):
    assert main(["check", "lm-tiny", *TINY, "--mesh", "fsdp=4,model=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lm-tiny on fsdp=4 × model=2: 8 virtual CPU devices"
    text = "\n".join(lines)
    table = [line.split() for line in lines]
    assert ["weight", "f32[264,24]", "(model,fsdp)", "1", "3.2", "kB"] in table
    assert "1   weft/hierarchy/mesh_layout.py:" in text
    assert ["s32[8,16]" in line for line in lines].count(True) == 2
    (parameters,) = [line for line in table if line[:1] == ["parameters"]]
    assert float(parameters[1]) == pytest.approx(8 * float(parameters[3]), rel=0.05)
    assert any(line[:2] == ["all-gather", "fsdp"] for line in table)
    assert any(line[:2] == ["all-reduce", "model"] for line in table)
    assert any(line[:3] == ["state", "and", "batch"] for line in table)
    assert lines[-1] == "fits: all sizes divide evenly, and the train step compiles"
    assert max(map(len, lines)) <= 80


@needs_eight
@pytest.mark.long
def test_exchange_of_tokens_with_experts_is_counted(capsys):
    assert main(["check", "lm-moe", "--mesh", "expert=8"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    # In each of three layers, four to apply the experts, and six for the gradients.
    in_loop = ["all-to-all", "expert", "in", "a", "loop", "30"]
    assert in_loop in [line[:6] for line in table]
    assert ["all-gather", "expert"] not in [line[:2] for line in table]


@needs_eight
@pytest.mark.long
def test_bubble_of_a_pipeline_is_shown(capsys):
    layers = "model.decoder.transformer.num_layers=4"
    modifier = 'ParallelismModifier.Config(pipeline=2,pipeline_schedule="interleaved")'
    modifiers = f"config_modifiers=[weft.trainer.parallelism.{modifier}]"
    assert main(["check", "lm-tiny", layers, TINY[1], modifiers]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["pipeline", "stages", "microbatches", "parts", "per", "stage", "bubble"] in table
    assert ["decoder.transformer.pipeline", "2", "4", "2", "11", "%"] in table


@needs_eight
def test_indivisible_recipe(capsys):
    assert main(["check", "lm-tiny", "--mesh", "data=2,model=4"]) == 1
    lines = capsys.readouterr().out.splitlines()
    path = "decoder/transformer/repeat/layer/self_attention/attention/i_proj/i_proj/qkv_proj"
    assert f"  parameter {path}/weight: axis 3 of size 2 does not divide over model=4" in lines
    assert not any("state of the learner" in line for line in lines)
    assert not any("memory per device" in line for line in lines)


@needs_eight
def test_rules_by_kind_are_shown_if_different(capsys):
    kinds = ["rules_by_kind.parameters=[[fsdp,null]]", "rules_by_kind.gradients=[[fsdp,model]]"]
    arguments = [*TINY, *kinds, "--mesh", "fsdp=4,model=2", "input.source.global_batch_size=6"]
    assert main(["check", "lm-tiny", *arguments]) == 1
    text = capsys.readouterr().out
    of_kinds = {part.split()[0]: part for part in text.split("\n\n") if part}
    assert "(model,-)" in of_kinds["parameter"]
    assert "(model,-)" in of_kinds["gradient"]
    assert "(model,fsdp)" in of_kinds["state"]
    assert "1   fsdp → - (model is taken)" in text
    assert "  gradients: decoder/emb/token_emb/weight: in (('model',), 'fsdp') the rule" in text
    assert "  batch input_ids: axis 0 of size 6" in text


@needs_eight
def test_indivisible_batch(capsys):
    overrides = ["input.source.global_batch_size=6", "--mesh", "data=4"]
    assert main(["check", "lm-tiny", *overrides]) == 1
    assert "  batch input_ids: axis 0 of size 6 does not divide over data=4" in (
        capsys.readouterr().out
    )


@needs_eight
@pytest.mark.long
def test_step_time_and_memory_of_a_device(capsys, monkeypatch):
    words = ["check", "lm-tiny", *TINY, "--mesh", "fsdp=4,model=2", "--device", "H100"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    table = {tuple(line.split()[:-1]): line.split()[-1] for line in lines if line}
    parts = [float(table[name,]) for name in ("compute", "memory")]
    collectives = [float(s) for name, s in table.items() if name[:2] == ("collectives", "over")]
    step = lines.index(next(line for line in lines if line.startswith("predicted step")))
    (total,) = [float(line.split()[-1]) for line in lines[step:] if line.startswith("in all")]
    assert total == pytest.approx(max(parts) + sum(collectives), rel=0.02)
    assert ("limited", "by") in table
    small = DEVICE_SPECS["H100"]._replace(memory=1e5)
    monkeypatch.setitem(DEVICE_SPECS, "H100", small)
    assert main(words) == 1
    assert "a device has 100.0 kB of memory, and the step needs" in capsys.readouterr().out


@needs_eight
@pytest.mark.long
def test_memory_that_the_compiler_refuses_is_a_problem(capsys, monkeypatch):
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "hbm. Used 28.22G of 15.75G hbm. Exceeded hbm capacity by 12.47G."
    )

    def refuse(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(SpmdTrainer, "compile_train_step", refuse)
    assert main(["check", "lm-tiny", *TINY, "--mesh", "data=8"]) == 1
    printed = capsys.readouterr().out
    assert "  a device has 15.75G of memory, and the step needs 28.22G. Shard over" in printed


@needs_eight
@pytest.mark.long
def test_program_that_jax_cannot_read_is_a_problem(capsys, monkeypatch):
    def fail(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure: async-update\nmore")

    monkeypatch.setattr(jax.stages.Compiled, "as_text", fail)
    assert main(["check", "lm-tiny", *TINY, "--mesh", "data=8"]) == 1
    printed = capsys.readouterr().out
    assert "temporaries" in printed
    assert "collectives: INTERNAL: RET_CHECK failure: async-update. Install" in printed


@needs_eight
@pytest.mark.long
def test_batch_larger_than_the_corpus(capsys):
    corpus = "input.source.corpus.pattern=json/*.py"
    batch = "input.source.global_batch_size=65536"
    assert main(["check", "lm-tiny", *TINY, corpus, batch, "--mesh", "data=8"]) == 0
    assert "s32[65536,16]" in capsys.readouterr().out


@needs_eight
@pytest.mark.long
def test_indivisible_activations(capsys):
    field = "model.decoder.hidden_state_partition_spec=[null,null,[data,model]]"
    wide = ["model.decoder.dim=20", "model.decoder.transformer.layer.feed_forward.hidden_dim=64"]
    arguments = [*TINY, *wide, field, "--mesh", "data=4,model=2"]
    assert main(["check", "lm-tiny", *arguments]) == 1
    assert "of a value of shape" in capsys.readouterr().out


@needs_eight
@pytest.mark.long
def test_spinner_is_not_for_pipes_with_forced_colors(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["check", "lm-tiny", *TINY, "--mesh", "fsdp=4,model=2"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[1m" in out and "times per step" in out
    assert "compiling the train step" not in out


def test_mesh_size_mismatch(capsys):
    assert main(["check", "lm-tiny", "--mesh", "data=3", "--devices", "1"]) == 2
    assert "needs 3 devices and there are 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("mesh_shape=[0,1]", "(data=0, model=1): each size is a positive number"),
        ("mesh_shape=[-2,1]", "(data=-2, model=1): each size is a positive number"),
        ("--devices 0", "--devices 0: expected 1 or more virtual CPU devices"),
        ("--devices -4", "--devices -4: expected 1 or more virtual CPU devices"),
        ("--slices 0", "--slices: '0' is not 1 or more"),
    ],
)
def test_sizes_below_one_are_refused(words, text, capsys):
    assert main(["check", "lm-tiny", *words.split()]) == 2
    assert text in capsys.readouterr().err


def test_too_few_jax_devices(capsys):
    jax.devices()
    assert main(["check", "lm-tiny", "--mesh", "data=4096"]) == 2
    assert "4096 virtual CPU devices are needed" in capsys.readouterr().err


@pytest.mark.long
def test_subprocess_creates_requested_devices(python_server, tmp_path):
    arguments = ["--mesh", "data=-1,model=2", "--devices", "8", "--slices", "2"]
    words = ["check", "lm-tiny", *TINY, "input.source.global_batch_size=32", *arguments]
    with weft_processes(python_server, tmp_path) as start:
        printed = finish(start(*words))
    assert printed.startswith("lm-tiny on data=8 × model=2: 16 virtual CPU devices")
    assert os.listdir(tmp_path) == []


def test_collectives_are_equal_for_several_slices():
    mesh: Any = types.SimpleNamespace(shape={"data": 4, "model": 2}, axis_names=("data", "model"))
    cfg: Any = types.SimpleNamespace(mesh_shape=(4, 2))
    for platform, data in (("tpu", 2), ("gpu", 4)):
        devices = [types.SimpleNamespace(platform=platform, slice_index=i // 4) for i in range(8)]
        assert _shape_of_program(cfg, mesh, devices) == {"data": data, "model": 2}


def test_memory_of_the_host_is_apart():
    sizes = dict.fromkeys(["argument", "output", "alias", "temp", "generated_code"], 1000)
    memory = types.SimpleNamespace(**{f"{name}_size_in_bytes": n for name, n in sizes.items()})
    memory.host_temp_size_in_bytes = 0
    names, numbers = columns(check._memory_table(memory))
    assert (names[-1], numbers[-1]) == ("in all", "3.0 kB")
    memory.host_temp_size_in_bytes = 5000
    names, numbers = columns(check._memory_table(memory))
    assert (names[-1], numbers[-1]) == ("offloaded to the host", "5.0 kB")
    assert numbers[-2] == "3.0 kB"


def columns(table):
    return [list(column.cells) for column in table.columns]
