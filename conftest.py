"""Every test runs on the CPU, on eight virtual devices unless WEFT_TEST_DEVICES says otherwise.

It stands at the root, so that the examples in weft/ run under it as the tests do.
"""

import os
import tempfile

# JAX reads both when it is first used, which is after pytest has read this file.
devices = os.environ.get("WEFT_TEST_DEVICES", "8")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={devices}"]
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling takes most of the suite's time, and the programs are too small to gain by being fast.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Many tests compile the same small programs, some in processes of their own: each is compiled once
# for all of them. The cache begins empty and goes with the temporary directory, so nothing is ever
# taken from an earlier version.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="weft-test-cache-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
