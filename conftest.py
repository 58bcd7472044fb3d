"""Every test runs on the CPU, on eight virtual devices unless WEFT_TEST_DEVICES says otherwise.

It stands at the root, so that the examples in weft/ run under it as the tests do.
"""

import os

# JAX reads both when it is first used, which is after pytest has read this file.
devices = os.environ.get("WEFT_TEST_DEVICES", "8")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={devices}"]
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
