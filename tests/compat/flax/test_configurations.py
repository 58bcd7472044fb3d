"""Flags of Flax, and what they change."""

import os
import subprocess
import sys
import traceback

import jax
import jax.numpy as jnp
import pytest

import weft
from weft import configurations, core, nnx
from weft import linen as nn
from weft import traceback_util as tracebacks
from weft.core.scope import LazyRng
from weft.errors import ArgumentValueError, FlagWarning, UnknownFlagError
from weft.training import checkpoints

flags = configurations.config


def under(name, value, f):
    before = getattr(flags, name)
    flags.update(name, value)
    try:
        return f()
    finally:
        flags.update(name, before)


def test_update():
    assert under("flax_profile", False, lambda: flags.flax_profile) is False
    with flags.temp_flip_flag("profile", False):
        assert weft.config.flax_profile is False  # pyright: ignore[reportAttributeAccessIssue]
    flags.update(configurations.flax_profile, True)
    assert flags.flax_profile is configurations.flax_profile.value is True
    with pytest.raises(
        UnknownFlagError, match=r"unknown flag 'flax_profil'. Did you mean 'flax_profile'"
    ):
        flags.update("flax_profil", True)
    with pytest.raises(
        AttributeError, match=r"unknown flag 'flax_profil'. Did you mean 'flax_profile'"
    ):
        flags.flax_profil  # noqa: B018
    with pytest.raises(AttributeError, match=r"set a flag by config.update\('flax_profile', 0\)"):
        flags.flax_profile = 0
    assert "flax_profile=True" in repr(flags)


def test_new_flags(monkeypatch):
    monkeypatch.setenv("WEFT_TEST_FLAG", "on")
    holder = configurations.bool_flag("weft_test_flag", default=False, help="")
    assert holder.value
    flags.update(holder, False)
    assert not holder.value
    with pytest.raises(ArgumentValueError, match="weft_test_flag is not its value"):
        bool(holder)
    with pytest.raises(ArgumentValueError, match="'weft_test_flag' is already defined"):
        configurations.bool_flag("weft_test_flag", default=False, help="")
    monkeypatch.setenv("WEFT_TEST_OTHER", "maybe")
    with pytest.raises(ArgumentValueError, match="WEFT_TEST_OTHER='maybe': expected 1 or 0"):
        configurations.bool_flag("weft_test_other", default=False, help="")


def test_unused_flags_warn_once():
    with pytest.warns(FlagWarning, match="flax_use_flaxlib changes nothing: Weft has no flaxlib"):
        flags.update("flax_use_flaxlib", True)
    flags.update("flax_use_flaxlib", False)


def test_environment():
    code = (
        "import sys, weft.core.settings; assert weft.core.settings.settings.fix_rng_separator; "
        "assert weft.config.flax_fix_rng_separator and 'jax' not in sys.modules"
    )
    environment = {"FLAX_FIX_RNG_SEPARATOR": "true"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_frozen_dicts():
    def made():
        module = nn.BatchNorm(use_running_average=False)
        variables = module.init(jax.random.key(0), jnp.ones((2, 1)))
        return variables, module.apply(variables, jnp.ones((2, 1)), mutable=True)[1]

    for variables in under("flax_return_frozendict", True, made):
        assert type(variables) is type(variables["batch_stats"]) is core.FrozenDict
    assert {type(variables) for variables in made()} == {dict}


def test_names_of_adopted_modules():
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self):
            return self.inner(jnp.ones(1))

    class Keeps(Outer):
        preserve_adopted_names = True

    def names(cls=Outer, **name):
        return list(cls(nn.Dense(1, **name)).init(jax.random.key(0))["params"])

    assert names(name="own") == ["inner"]
    assert names(Keeps, name="own") == ["own"]
    assert under("flax_preserve_adopted_names", True, lambda: names(name="own")) == ["own"]
    assert under("flax_preserve_adopted_names", True, names) == ["inner"]


def test_separator_tells_streams_apart():
    def key(*names):
        return LazyRng.create(jax.random.key(0), *names).as_jax_rng()

    assert key("ab") == key("a", "b")
    assert under("flax_fix_rng_separator", True, lambda: key("ab") != key("a", "b"))


def test_checkpoints_of_orbax(tmp_path):
    def save():
        return checkpoints.save_checkpoint(tmp_path, {"w": jnp.ones(1)}, 1, overwrite=True)

    assert os.path.isfile(save())
    assert checkpoints.is_orbax(under("flax_use_orbax_checkpointing", True, save))


def test_settings_of_nnx():
    def current():
        return nnx.set_graph_mode.current_value(), nnx.set_graph_updates.current_value()

    assert under("nnx_graph_mode", False, current) == (False, True)
    assert under("nnx_graph_updates", False, current) == (True, False)
    assert under("flax_always_shard_variable", False, nnx.using_eager_sharding) is False


def test_profiles():
    class Named(nn.Module):
        @nn.compact
        def __call__(self):
            return jnp.ones(1) + 1

    def text():
        return jax.jit(lambda: Named(name="outer").apply({})).lower().as_text(debug_info=True)

    assert "outer" in text()
    assert "outer" not in under("flax_profile", False, text)


def test_frames():
    def frames():
        try:
            nn.Dense(1).apply({}, jnp.ones(1))
        except Exception as error:
            return [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        return []

    assert "applied" not in frames()
    tracebacks.show_flax_in_tracebacks()
    assert "applied" in frames()
    tracebacks.hide_flax_in_tracebacks()
    assert "frames" in frames()


def test_hidden_files(monkeypatch):
    class Fails(nn.Module):
        def __call__(self):
            raise ValueError("here")

    def frames():
        with pytest.raises(ValueError, match="here") as raised:
            Fails().apply({})
        return [entry.name for entry in raised.traceback]

    assert "__call__" in frames()
    monkeypatch.setattr("weft.core.tracebacks._EXCLUDED", [])
    tracebacks.register_exclusion(__file__)
    assert "__call__" not in frames()
