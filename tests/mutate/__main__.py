"""Mutates source files and runs their tests: python -m tests.mutate [FILE ...].

Works on a copy of the repository. The tests of weft/a/b.py are its doctests, tests/a/test_b.py and
the test files that name the module weft.a.b; without any, those below tests/a that name one of its
functions or classes. Long tests and those of tests/parity are left out. A mutation that passes
shows a line that no test notices, unless the changed program does the same.
"""

import argparse
import ast
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutate.mutations import Mutation, mutations

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("files", nargs="*", help="by default those that differ from BASE")
    parser.add_argument("--base", default="origin/main", help="a commit")
    parser.add_argument("--count", type=int, default=30, help="how many mutations to try")
    parser.add_argument("--seed", type=int, default=0, help="another seed samples other mutations")
    options = parser.parse_args()
    files = options.files or changed_files(options.base)
    every = [m for file in files for m in mutations(file, (ROOT / file).read_text("utf-8"))]
    chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
    print(f"{len(chosen)} of {len(every)} mutations of {len(files)} files", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        return try_all(chosen, copy_repository(Path(scratch)))


def changed_files(base: str) -> list[str]:
    changed = _git("diff", "--name-only", "--diff-filter=d", "--merge-base", base, "--", "weft")
    return [path for path in changed if path.endswith(".py")]


def copy_repository(to: Path) -> Path:
    for path in _git("ls-files", "--cached", "--others", "--exclude-standard"):
        if (ROOT / path).is_file():
            (to / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, to / path)
    return to


def _git(*args: str) -> list[str]:
    return subprocess.check_output(["git", *args], cwd=ROOT, text=True).splitlines()


def nearest_tests(path: str, root: Path) -> list[str]:
    """Returns the tests of a file, the nearest first."""
    file = Path(path)
    package = Path("tests", *file.parent.parts[1:])
    texts = {
        str(test.relative_to(root)): test.read_text("utf-8")
        for test in sorted((root / "tests").rglob("test_*.py"))
        if "parity" not in test.parts
    }
    mirror = str(package / f"test_{file.stem}.py")
    module = re.compile(re.escape(".".join(file.with_suffix("").parts)) + r"\b")
    nearest = [mirror] * (mirror in texts)
    nearest += [test for test, text in texts.items() if test != mirror and module.search(text)]
    if not nearest:
        body = ast.parse((root / path).read_text("utf-8")).body
        names = [x.name for x in body if isinstance(x, ast.FunctionDef | ast.ClassDef)]
        named = re.compile(rf"\b(?:{'|'.join(names) or file.stem})\b")
        below = (str(package) + os.sep, f"{package.parent}{os.sep}test_{package.name}")
        nearest = [t for t, text in texts.items() if t.startswith(below) and named.search(text)]
    return [path, *nearest]


def try_all(chosen: list[Mutation], root: Path) -> int:
    chosen.sort(key=lambda mutation: (mutation.path, mutation.start))
    killed = survived = exit_code = 0
    for path, of_file in itertools.groupby(chosen, key=lambda mutation: mutation.path):
        tests = nearest_tests(path, root)
        start = time.monotonic()
        if failure := find_failure(tests, root, limit=3600):
            print(f"{path}: the tests fail without a mutation\n{failure}", flush=True)
            exit_code = 1
            continue
        limit = 30 + 3 * (time.monotonic() - start)
        print(f"{path}: {' '.join(tests)}", flush=True)
        for mutation in of_file:
            write(root / path, mutation.mutated)
            if find_failure(tests, root, limit):
                killed += 1
                print(f"killed   {path}:{mutation.line}", flush=True)
            else:
                survived += 1
                print(f"survived {path}:{mutation.line}\n{mutation.diff()}", flush=True)
            write(root / path, mutation.text)
    tried = killed + survived
    print(f"killed {killed} of {tried} ({killed / max(tried, 1):.0%})")
    return exit_code


def write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        stale.unlink()


def find_failure(tests: list[str], root: Path, limit: float) -> str:
    """Returns the end of the output of tests that fail; a mutated loop may exceed the limit."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not long and not soak", *tests]
    command += ["-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            command, cwd=root, env=env, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return f"no result after {limit:.0f} s"
    return (
        "" if done.returncode in (0, 5) else (done.stdout + done.stderr)[-2000:]
    )  # 5: there are none


if __name__ == "__main__":
    sys.exit(main())
