"""The package as a whole: what importing it costs, what it does not import, what it lists."""

import subprocess
import sys

import weft.config

MEASURE = """
import sys, time
start = time.process_time()
import weft.config
print(time.process_time() - start)
print(sorted({"jax", "jaxlib", "numpy", "attr", "optax"} & set(sys.modules)))
"""


def test_import_is_fast_and_without_jax():
    def measure():
        result = subprocess.run(
            [sys.executable, "-c", MEASURE], capture_output=True, encoding="utf-8", check=True
        )
        seconds, imported = result.stdout.splitlines()
        assert imported == "[]"
        return float(seconds)

    # The best of a few, since other work may share the machine's caches.
    assert min(measure() for _ in range(5)) <= 0.1


def test_all_names_exist():
    assert len(weft.config.__all__) == len(set(weft.config.__all__))
    for name in weft.config.__all__:
        assert getattr(weft.config, name) is not None


def test_every_error_derives_from_one_base():
    errors = [name for name in weft.config.__all__ if name.endswith("Error")]
    assert len(errors) == 14
    for name in errors:
        assert issubclass(getattr(weft.config, name), weft.config.ConfigError)
