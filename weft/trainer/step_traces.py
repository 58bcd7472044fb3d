"""Profiler traces of chosen steps, for XProf, TensorBoard or Perfetto.

Each trace has its own directory below the run's, `trace/step_00000010/plugins/profile/<time>/`,
with `*.xplane.pb` for XProf and TensorBoard's profile plugin, and `*.trace.json.gz` for
ui.perfetto.dev.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax

from weft.errors import ProfilerTraceError

_DEFAULT_STEPS = 3


class StepTraces:
    """Controller that starts and stops the profiler around steps.

    Args:
        directory: The run's directory.
        start_steps: The first steps of traces; steps within an earlier trace are ignored.
        n_steps: Number of steps per trace; None for 3. Less than 1 raises a ProfilerTraceError.
        processes: The processes that trace, or "all".
        host_tracer_level, python_tracer_level: Level of detail for the host and for Python, 0 for
            none; None for JAX's default.
    """

    def __init__(
        self,
        directory: str,
        start_steps: Sequence[int],
        n_steps: int | None = None,
        processes: Literal["all"] | Sequence[int] = (0,),
        *,
        host_tracer_level: int | None = None,
        python_tracer_level: int | None = None,
    ):
        if n_steps is not None and n_steps < 1:
            raise ProfilerTraceError(
                f"n_steps_for_each_trace={n_steps}; expected 1 or more steps, or None for "
                f"{_DEFAULT_STEPS}."
            )
        here = processes == "all" or jax.process_index() in processes
        self._start_steps = frozenset(start_steps if here else ())
        self._directory = directory
        self._n_steps = n_steps or _DEFAULT_STEPS
        self._last: int | None = None  # the last step of the open trace
        self._options = jax.profiler.ProfileOptions()
        if host_tracer_level is not None:
            self._options.host_tracer_level = host_tracer_level
        if python_tracer_level is not None:
            self._options.python_tracer_level = python_tracer_level

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[Callable[[Any], None]]:
        """Surrounds a step.

        Yields a function to call with the step's outputs, which it waits for if a trace ends here.
        """
        if step in self._start_steps and self._last is None:
            directory = os.path.join(self._directory, f"trace/step_{step:08d}")
            jax.profiler.start_trace(directory, profiler_options=self._options)
            self._last = step + self._n_steps - 1
        results: list[Any] = []
        yield results.append
        if self._last is not None and step >= self._last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """Ends an open trace, as when the run ends before the trace does."""
        if self._last is not None:
            self._last = None
            jax.profiler.stop_trace()
