import jax
import jax.numpy as jnp
import pytest

from weft.trainer.compilation_cache import compilation_cache


@pytest.fixture(autouse=True)
def small_programs_are_kept():
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def test_programs_are_kept_in_the_directory_while_it_is_open(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    with compilation_cache(str(tmp_path)):
        jax.jit(lambda x: jnp.sin(x) + 17.25)(jnp.ones(3))
    kept = list(tmp_path.iterdir())
    assert kept
    assert jax.config.jax_compilation_cache_dir == before
    jax.jit(lambda x: jnp.sin(x) + 18.25)(jnp.ones(3))
    assert list(tmp_path.iterdir()) == kept


def test_none_leaves_all_as_it_is():
    before = jax.config.jax_compilation_cache_dir
    with compilation_cache(None):
        assert jax.config.jax_compilation_cache_dir == before
