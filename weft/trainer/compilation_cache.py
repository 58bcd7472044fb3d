"""A directory in which compiled programs outlive the process: a restart need not compile."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache


@contextlib.contextmanager
def compilation_cache(directory: str | None) -> Iterator[None]:
    """While open, JAX keeps compiled programs in a directory, and takes them from there.

    Programs that compile within a second are not kept, unless JAX's own setting
    `jax_persistent_cache_min_compile_time_secs` says otherwise. Several processes and runs may
    share a directory.

    Args:
        directory: Where; None leaves JAX as it is set up.
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
    # What is open belongs to the directory before.
    jax_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", directory)
