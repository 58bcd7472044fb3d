"""Runs fuzzers: python -m tests.fuzz [--minutes M] [--seed S] [NAME ...]."""

import argparse
import os
import sys


def main() -> int:
    # Read by JAX when it is first used. Compiling takes most of the time.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    # One device is another than that where arrays are by default.
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    os.environ.setdefault("NPROC", "32")  # see `weft.distributed.cpu_threads`
    from tests.fuzz import harness

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(harness.names())}")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each of them")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(harness.names())):
        parser.error(f"no fuzzer is named {unknown}; there are {harness.names()}")
    found = [
        harness.fuzz(name, options.minutes, options.seed, lambda text: print(text, flush=True))
        for name in options.names or harness.names()
    ]
    return int(any(found))


if __name__ == "__main__":
    sys.exit(main())
