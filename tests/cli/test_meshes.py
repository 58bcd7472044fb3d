import pytest

from weft.cli.meshes import on_mesh, parse_mesh
from weft.errors import CommandLineError
from weft.recipes.lm import lm_tiny
from weft.trainer.parallelism import MESH_AXIS_NAMES


def test_axes_of_the_config():
    cfg = on_mesh(lm_tiny(), mesh="model=2")
    assert cfg.mesh_shape == (1, 2)
    assert cfg.mesh_axis_names == ("data", "model")
    assert on_mesh(lm_tiny(), mesh="data=-1, model=2").mesh_shape == (-1, 2)
    assert on_mesh(lm_tiny()) == lm_tiny()


def test_other_axes_lay_the_transformer_over_them():
    cfg = on_mesh(lm_tiny(), mesh="fsdp=4,model=2")
    assert cfg.mesh_axis_names == MESH_AXIS_NAMES
    assert dict(zip(cfg.mesh_axis_names, cfg.mesh_shape, strict=True))["fsdp"] == 4
    assert cfg.model.decoder.emb.token_emb.param_partition_spec == ("model", "fsdp")


def test_the_hardware():
    rules = [("gpu-.*", (4, 2)), ("tpu-.*", None)]
    assert on_mesh(lm_tiny().set(mesh_rules=rules), selector="gpu-8").mesh_shape == (4, 2)
    with pytest.raises(CommandLineError, match=r"'cpu': no mesh rule .* match 'gpu-.*', 'tpu-"):
        on_mesh(lm_tiny().set(mesh_rules=rules), selector="cpu")
    with pytest.raises(CommandLineError, match="The rules match nothing"):
        on_mesh(lm_tiny(), selector="cpu")


@pytest.mark.parametrize("text", ["", "data", "data=0", "data=2,data=2", "data=2;model=2"])
def test_what_names_no_mesh(text):
    with pytest.raises(CommandLineError, match="write it as --mesh data=4,model=2"):
        parse_mesh(text)


def test_axes_that_are_not_there():
    with pytest.raises(
        CommandLineError, match=r"no axis 'dta'\. The config's mesh has 'data', 'mo"
    ):
        on_mesh(lm_tiny(), mesh="dta=2,fsdp=2")
