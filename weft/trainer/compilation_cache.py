"""Persistent cache of compiled programs, which saves a restarted run its compilations."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache


@contextlib.contextmanager
def compilation_cache(directory: str | None) -> Iterator[None]:
    """Uses a directory as JAX's persistent compilation cache within the block.

    Programs that compile within a second are not stored, unless JAX's setting
    `jax_persistent_cache_min_compile_time_secs` differs. Several processes and runs may share a
    directory. None leaves JAX's settings as they are.
    """
    if directory is None:
        yield
        return
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    _use(directory)
    try:
        yield
    finally:
        _use(before)


def _use(directory: str | None) -> None:
    # The open cache belongs to the previous directory.
    jax_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", directory)
