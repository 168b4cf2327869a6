"""Test a sample of mutations: the share of small faults in a folder that the nearest tests find.

    pip install cosmic-ray pytest-cov -e '.[test]'
    python benchmarks/mutants.py converter/proof --tests tests/test_proof_*.py --wider tests/test_convert.py

Works on a copy. The quick tests run once, with coverage by test. Then `--count` mutants of cosmic-ray are drawn
uniformly from each folder, and each is run against the tests that reach its statement, the quickest first, until one
fails. Survivors are run against all of the `--wider` files. A mutant is killed if a test fails, or takes ten times as
long as it should. Annotations and decorators are not mutated: nothing that runs depends on them.
"""

import argparse
import ast
import difflib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import coverage
import pytest
from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_code, use_mutation
from cosmic_ray.plugins import get_operator

ROOT = Path(__file__).resolve().parent.parent
_IN_CHILDREN = """
import os
if "PYTEST_CURRENT_TEST" in os.environ and "CHILDREN_COVERED" in os.environ:
    import coverage, threading, time
    measured = coverage.Coverage(config_file=os.environ["CHILDREN_COVERED"], data_suffix=True)
    measured.start()
    def save():  # a worker is killed when it is not needed any more
        while True:
            time.sleep(0.2)
            measured.save()
    threading.Thread(target=save, daemon=True).start()
"""
_OF_CHILDREN = """
[run]
parallel = true
source_pkgs = edge_opt
data_file = {}/.children
context = ${{PYTEST_CURRENT_TEST}}
"""
_SAME = ("_Eq_Is", "_Is_Eq", "_NotEq_IsNot", "_IsNot_NotEq")  # of small numbers and None
_LEAST_SECONDS = 20
_WIDER_SECONDS = 900


@dataclass(frozen=True)
class Mutant:
    """One change of one file; `lines` of the copy."""

    path: Path
    operator: str
    occurrence: int
    lines: range

    def __str__(self) -> str:
        differences = difflib.ndiff(*map(str.splitlines, self._before_and_after()))
        said = "".join(f"\n    {line}" for line in differences if line[0] in "+-")
        return f"{self.path.name}:{self.lines.start} {self.operator.removeprefix('core/')}{said}"

    def says_something(self) -> bool:
        """Whether it compiles, and is more than `is` for `==` or a `/` for the `*` between parameters."""
        before, after = self._before_and_after()
        try:
            ast.parse(after)
        except SyntaxError:
            return False
        return not self.operator.endswith(_SAME) and after.count("/, ") == before.count("/, ")

    def _before_and_after(self) -> tuple[str, str]:
        code = self.path.read_text(encoding="utf-8")
        return code, mutate_code(code, get_operator(self.operator)(), self.occurrence) or code


class Bench:
    """A copy of the project, laid out as the wheel is, and which tests reach which lines of it."""

    def __init__(self, folder: Path, tests: Iterable[str], wider: Iterable[str]) -> None:
        self.folder = folder
        self._wider = tuple(wider)
        for name in (
            "tests",
            "testdata",
            "docs",
            "examples",
            "converter",
            "schema",
            "cli",
            "pyproject.toml",
        ):
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
        self.package = folder / "src" / "edge_opt"
        shutil.copytree(ROOT / "converter", self.package)
        for name in ("schema", "cli", "testdata"):
            shutil.copytree(ROOT / name, self.package / name)
        (folder / "src" / "sitecustomize.py").write_text(_IN_CHILDREN, encoding="utf-8")
        (folder / "children.cfg").write_text(_OF_CHILDREN.format(folder), encoding="utf-8")
        os.environ["PYTHONPATH"] = str(folder / "src")
        sys.path.insert(0, str(folder / "src"))
        os.chdir(folder)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "not slow",
            "--cov=edge_opt",
            "--cov-context=test",
        ]
        command += ["--cov-report=", "--junitxml=tests.xml", *tests]
        watched = {**os.environ, "CHILDREN_COVERED": str(folder / "children.cfg")}
        subprocess.run(command, check=False, env=watched)
        self._data = coverage.CoverageData(str(folder / ".coverage"))
        self._data.read()
        for file in folder.glob(".children.*"):
            of_child = coverage.CoverageData(str(file))
            with suppress(coverage.exceptions.DataError):  # a child that was killed while it wrote
                of_child.read()
                self._data.update(of_child)
        self._every = {context.rpartition("|")[0] for context in self._data.measured_contexts()} - {
            ""
        }
        self._seconds = {
            f"{case.get('classname')}.{case.get('name')}": float(case.get("time") or 0)
            for case in ET.parse(folder / "tests.xml").iter("testcase")  # noqa: S314 - our own
            if case.find("failure") is None and case.find("error") is None
        }

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that reach its statement, the quickest first.

        Of what runs at import, those that reach the module. Of what runs in another process, all of a file that started
        such a one: which of its tests made it do so is not known.
        """
        contexts = self._data.contexts_by_lineno(str(mutant.path))
        imported = any("" in contexts.get(line, ()) for line in mutant.lines)
        lines = contexts if imported else mutant.lines
        found = {context for line in lines for context in contexts.get(line, ())}
        files = {context.partition("::")[0] for context in found if context.endswith(")")}
        named = {context.rpartition("|")[0] for context in found}
        known = [
            (self._seconds[key], test)
            for test in self._every
            if (key := _key(test)) in self._seconds
            and (test in named or test.partition("::")[0] in files)
        ]
        return [test for _, test in sorted(known)]

    def seconds(self, tests: Iterable[str]) -> float:
        """How long they take together."""
        return sum(self._seconds[_key(test)] for test in tests)

    def kills(self, mutant: Mutant) -> bool:
        """Whether one of its tests fails with the mutant in place."""
        tests = self.tests_of(mutant)
        quick = [
            test for at, test in enumerate(tests) if self.seconds(tests[: at + 1]) < 1
        ] or tests[:1]
        _forget(mutant.path)
        try:
            with use_mutation(mutant.path, get_operator(mutant.operator)(), mutant.occurrence):
                return any(
                    _fails(batch, _LEAST_SECONDS + 10 * self.seconds(batch))
                    for batch in (quick, [test for test in tests if test not in quick])
                    if batch
                ) or any(_fails([file], _WIDER_SECONDS) for file in self._wider)
        finally:
            _forget(mutant.path)

    def check(self) -> None:
        """Tests that fail without a fault would find every one."""
        quick = sorted(self._seconds, key=lambda key: self._seconds[key])[:30]
        assert not _fails([test for test in self._every if _key(test) in quick], 300)


def _forget(module: Path) -> None:
    """Python looks at a module's size and its time in seconds only: a mutant's code must not outlive it."""
    for stale in (module.parent / "__pycache__").glob(f"{module.stem}.*"):
        stale.unlink()


def _key(test: str) -> str:
    """tests/test_a.py::test_b[c] -> tests.test_a.test_b[c], as in JUnit's file."""
    path, _, name = test.partition("::")
    return f"{path.removesuffix('.py').replace('/', '.')}.{name.replace('::', '.')}"


def _fails(tests: list[str], seconds: float) -> bool:
    """Run tests in a fork of this process, which has loaded what they share; no answer is a failure, too."""
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        os._exit(
            int(
                pytest.main(
                    ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:cov", "-m", "not slow", *tests]
                )
            )
            & 0xFF
        )
    until = time.monotonic() + 10 * seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return True
        time.sleep(0.05)


def mutants(folder: Path) -> Iterator[Mutant]:
    """Every mutant of the modules of a folder, outside annotations and decorators."""
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inert, statements = set(_inert(tree)), list(_statements(tree))
        for item in _all_work_items([path], {}):
            for spec in item.mutations:
                if spec.operator_name == "core/RemoveDecorator" or spec.start_pos in inert:
                    continue
                own = range(spec.start_pos[0], spec.end_pos[0] + 1)
                lines = [lines for lines in statements if own.start in lines]
                yield Mutant(
                    path, spec.operator_name, spec.occurrence, min(lines, key=len, default=own)
                )


def _statements(tree: ast.AST) -> Iterator[range]:
    """The lines of each statement, of a compound one those before its body: coverage does not know them all."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            yield range(
                node.lineno,
                max(body[0].lineno, node.lineno + 1) if body else (node.end_lineno or 0) + 1,
            )


def _inert(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """Positions in annotations and decorators."""
    named = ("annotation", "returns", "decorator_list")
    for node in ast.walk(tree):
        for value in (value for name in named for value in _as_list(getattr(node, name, None))):
            for inner in ast.walk(value):
                if isinstance(inner, ast.expr):
                    yield from (
                        (inner.lineno, at)
                        for at in range(inner.col_offset, inner.end_col_offset or 0)
                    )


def _as_list(value: Any) -> list[ast.AST]:
    return value if isinstance(value, list) else [value] if isinstance(value, ast.AST) else []


def main() -> None:
    """Print each survivor, and the share that was killed in each folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", help="e.g. converter/passes")
    parser.add_argument("--count", type=int, default=100, help="mutants of each folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="*", default=["tests"], help="what to choose from")
    parser.add_argument(
        "--wider", nargs="*", default=[], help="files that what survives those meets as well"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edge-opt-mutants-") as scratch:
        bench = Bench(Path(scratch), options.tests, options.wider)
        import ai_edge_litert.interpreter  # noqa: F401, PLC0415 - forks share what is loaded
        import hypothesis  # noqa: F401, PLC0415

        bench.check()
        results: dict[str, list[bool]] = defaultdict(list)
        for folder in options.folders:
            drawn = list(mutants(bench.package / Path(folder).name))
            random.Random(options.seed).shuffle(drawn)  # noqa: S311 - no secret
            for mutant in islice(filter(Mutant.says_something, drawn), options.count):
                results[folder].append(bench.kills(mutant))
                print(f"\r{len(results[folder])}", end="", file=sys.stderr, flush=True)
                if not results[folder][-1]:
                    reached = len(bench.tests_of(mutant))
                    print(f"{folder}: survived {mutant} ({reached} tests reach it)", flush=True)
            found = results[folder]
            print(
                f"{folder}: {sum(found)} of {len(found)} killed, drawn from {len(drawn)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
