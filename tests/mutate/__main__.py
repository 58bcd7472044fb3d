"""Mutates source files and runs their tests: python -m tests.mutate [FILE ...].

Works on a copy of the repository. The nearest tests of weft/a/b.py are its doctests,
tests/a/test_b.py and the test files that name the module weft.a.b; without any, those below tests/a
that name one of its functions or classes. If they pass, the long ones of these files follow, then
the other files of tests/a, and those elsewhere, tests/parity among them, that name one of its
public functions or classes: first those that name what is mutated. Each run has a limit. A mutation
that passes shows a line that no test notices, unless the changed program does the same.
"""

import argparse
import ast
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutate import prioritize
from tests.mutate.mutations import Mutation, edits, is_other_program

ROOT = Path(__file__).parents[2]
LIMIT = 120  # seconds for a run of tests; a single quick test may take half of it
_QUICK = "not long and not soak"
Definition = ast.FunctionDef | ast.ClassDef


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("files", nargs="*", help="by default those that differ from BASE")
    parser.add_argument("--base", default="origin/main", help="a commit")
    parser.add_argument("--count", type=int, default=30, help="how many mutations to try")
    parser.add_argument("--seed", type=int, default=0, help="another seed samples other mutations")
    options = parser.parse_args()
    files = options.files or changed_files(options.base)
    every = [m for file in files for m in edits(file, (ROOT / file).read_text("utf-8"))]
    random.Random(options.seed).shuffle(every)
    chosen = list(itertools.islice(filter(is_other_program, every), options.count))
    print(f"{len(chosen)} of about {len(every)} mutations of {len(files)} files", flush=True)
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
    return subprocess.check_output(["git", *args], cwd=ROOT, encoding="utf-8").splitlines()


class Suite:
    """The test files of a copy of the repository."""

    def __init__(self, root: Path):
        self._root = root
        files = sorted((root / "tests").rglob("test_*.py"))
        self._texts = {str(file.relative_to(root)): file.read_text("utf-8") for file in files}

    def nearest(self, path: str) -> list[str]:
        """Returns the source file itself, for its doctests, and its own test files."""
        file = Path(path)
        package = Path("tests", *file.parent.parts[1:])
        texts = {test: text for test, text in self._texts.items() if "parity" not in test}
        mirror = str(package / f"test_{file.stem}.py")
        module = re.compile(re.escape(".".join(file.with_suffix("").parts)) + r"\b")
        nearest = [mirror] * (mirror in texts)
        nearest += [test for test, text in texts.items() if test != mirror and module.search(text)]
        if not nearest:
            body = ast.parse((self._root / path).read_text("utf-8")).body
            named = _naming(definitions(body) or [file.stem])
            below = (str(package) + os.sep, f"{package.parent}{os.sep}test_{package.name}")
            nearest = [t for t, text in texts.items() if t.startswith(below) and named.search(text)]
        return [path, *nearest]

    def others(self, mutation: Mutation) -> list[str]:
        """Returns the other test files that may notice a mutation, the likeliest first."""
        names = definitions(ast.parse(mutation.text).body)
        of_file = _naming([name for name in names if not name.startswith("_")])
        around = _naming(names_around(mutation))
        package = str(Path("tests", *Path(mutation.path).with_suffix("").parts[1:2]))
        nearest = self.nearest(mutation.path)
        others = [
            test
            for test, text in self._texts.items()
            if test not in nearest and (test.startswith(package) or of_file.search(text))
        ]
        return sorted(
            others,
            key=lambda t: (not around.search(self._texts[t]), not t.startswith(package)),
        )


def definitions(body: list[ast.stmt]) -> list[str]:
    return [x.name for x in body if isinstance(x, Definition)]


def names_around(mutation: Mutation) -> list[str]:
    """Returns the functions and classes around a mutation, then those of the file that use them."""
    tree = ast.parse(mutation.text)
    around = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, Definition)
        and node.lineno <= mutation.line <= (node.end_lineno or 0)
        and not node.name.startswith("__")
    ][::-1]
    names = list(around)
    for name in names:  # grows meanwhile
        names += [
            user.name
            for user in tree.body
            if isinstance(user, Definition)
            and user.name not in names
            and any(isinstance(x, ast.Name) and x.id == name for x in ast.walk(user))
        ]
    return names


def _naming(names: list[str]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(names)})\b" if names else r"(?!)")


def try_all(chosen: list[Mutation], root: Path) -> int:
    chosen.sort(key=lambda mutation: (mutation.path, mutation.start))
    suite = Suite(root)
    killers: set[str] = set()
    killed = 0
    for mutation in chosen:
        write(root / mutation.path, mutation.mutated)
        failure = find_failure(suite, mutation, root)
        write(root / mutation.path, mutation.text)
        killed += bool(failure)
        killers.add(failure)
        result = f"killed   {mutation.path}:{mutation.line} by {failure}"
        survival = f"survived {mutation.path}:{mutation.line}\n{mutation.diff()}"
        print(result if failure else survival, flush=True)
    print(f"killed {killed} of {len(chosen)} ({killed / max(len(chosen), 1):.0%})")
    return fail_without_mutation(killers, root)


def write(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        stale.unlink()


def find_failure(suite: Suite, mutation: Mutation, root: Path) -> str:
    """Returns the test that fails, empty if all pass."""
    nearest, names = suite.nearest(mutation.path), names_around(mutation)
    return (
        first_failure(nearest[:2], names, root, 5 * LIMIT)
        or first_failure(nearest[2:], names, root, LIMIT)
        or first_failure(nearest, names, root, LIMIT / 2, marks="long and not soak")
        or first_failure(suite.others(mutation), names, root, LIMIT)
    )


def first_failure(
    tests: list[str], names: list[str], root: Path, limit: float, marks: str = _QUICK
) -> str:
    """Returns the first test that fails, empty if all pass that run within the limit."""
    if not tests:
        return ""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", marks, *tests]
    command += ["-p", prioritize.__name__]
    # A mutated program may never end.
    command += ["-o", f"faulthandler_timeout={LIMIT / 2}", "-o", "faulthandler_exit_on_timeout=yes"]
    kept = root / ".pytest_cache" / "v" / "cache" / "lastfailed"
    kept.unlink(missing_ok=True)
    # Most mutations leave most programs as they are, and compiling takes most of the time.
    caches = {"JAX_COMPILATION_CACHE_DIR": str(root / ".jax_cache")}
    caches["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    env = {**os.environ, **caches, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    env[prioritize.NAMES] = " ".join(names)
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=root, env=env, stdout=nowhere, stderr=nowhere, start_new_session=True
    ) as run:
        try:
            exit_code = run.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # with the processes that tests started
            return ""
    if exit_code in (0, 5):  # 5: there are none
        return ""
    failed = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    return next(iter(failed), "a run without a result")


def fail_without_mutation(tests: set[str], root: Path) -> int:
    """Prints the tests that fail without a mutation, which have killed nothing."""
    exit_code = 0
    while (remaining := sorted(test for test in tests if "::" in test)) and (
        failure := first_failure(remaining, [], root, 3600, marks="not soak")
    ):
        print(f"{failure} fails without a mutation", flush=True)
        exit_code = 1
        if failure not in tests:
            break
        tests.remove(failure)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
