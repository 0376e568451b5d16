"""Draw mutants of the code that carries the numbers, and count those that its tests notice.

    python -m tests.mutants --number 100 --seed 7

Each mutant changes one place: an operator, a comparison, a sign, a constant, a clamp, an axis, two arguments, a
statement that is dropped, or a number in a data file. The tests that ran the changed line run, as the coverage of all
tests knows them: a few of the narrowest, the recorded values, and the others; where it knows none (compiled code,
data), the recorded values, those that import the module, those of its mirrored folder, and the commands' recorded
answers. Each mutant lives in a copy of the tree.
A survivor is a hole in the tests, or changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import coverage
import numba
import pandas as pd  # noqa: F401  # loaded once, for the tests of every mutant
import pytest
import scipy.stats  # noqa: F401
import sklearn.linear_model  # noqa: F401
import torch  # noqa: F401

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "specsim/cost", "specsim/engines", "specsim/replaying", "specsim/policy", "specsim/trace", "specsim/acceptance",
    "specsim/learn", "specsim/serving", "specsim/claims", "realrun/decode", "realrun/proposals", "realrun/measure",
    "realrun/experiment", "kernels/speckernels",
)  # fmt: skip
DATA = ("specsim/cost/roofline/*.json", "specsim/cost/shipped/*.json")
SLOW = "triton.py"  # interpreted on CPUs, in minutes
MOST_FILES = 16  # test files of a mutant
FIRST_TESTS = 12  # of a line, which are to be ahead of its recorded values
MOST_TESTS = 120  # tests of a line, and all of the recorded values
VALUES = "tests/contract/test_values.py"
UNMUTATED = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast", "InputError", "print", "warn", "join"}
SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "and": "or", "or": "and"}
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "@": "*", "**": "*"}
CLAMPS = {"min", "max", "minimum", "maximum", "clip"}


@dataclass(frozen=True)
class Mutant:
    """A file whose bytes start to end are replaced."""

    kind: str
    file: str
    start: int
    end: int
    new: bytes

    def text(self, old: bytes) -> bytes:
        return old[: self.start] + self.new + old[self.end :]

    @property
    def lines(self) -> range:
        """The lines that it changes, from 1."""
        old = (ROOT / self.file).read_bytes()
        return range(old.count(b"\n", 0, self.start) + 1, old.count(b"\n", 0, self.end) + 2)

    def __str__(self) -> str:
        old = (ROOT / self.file).read_bytes()[self.start : self.end]
        before, after = (" ".join(text.decode().split()) for text in (old, self.new))
        return f"{self.file}:{self.lines[0]} {self.kind}: {before[:70]!r} -> {after[:70]!r}"


class Finder(ast.NodeVisitor):
    """The mutants of a Python file, which `found` collects."""

    def __init__(self, file: str) -> None:
        self.file, self.content, self.found = file, (ROOT / file).read_bytes(), list[Mutant]()
        self.starts = [0, *(found.end() for found in re.finditer(b"\n", self.content))]
        self.visit(ast.parse(self.content))

    def place(self, node: Any) -> tuple[int, int]:
        return (self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset)

    def source(self, node: ast.AST) -> bytes:
        start, end = self.place(node)
        return self.content[start:end]

    def add(self, kind: str, node: ast.AST, new: bytes) -> None:
        self.found.append(Mutant(kind, self.file, *self.place(node), new))

    def between(self, kind: str, left: ast.AST, right: ast.AST, others: dict[str, str]) -> None:
        """Replace the operator between two operands."""
        start, end = self.place(left)[1], self.place(right)[0]
        operator = self.content[start:end].strip(b" ()\n\\").decode(errors="replace")
        if operator in others:
            at = self.content.index(operator.encode(), start)
            self.found.append(Mutant(kind, self.file, at, at + len(operator), others[operator].encode()))

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
            return  # a message, or a check of types
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.dump(node.test):
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            self.between("comparison", node.left, node.comparators[0], SWAPS)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.between("and/or", node.values[0], node.values[1], SWAPS)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(isinstance(side, ast.Constant | ast.JoinedStr) and not self.number(side) for side in ast.walk(node)):
            self.between("arithmetic", node.left, node.right, ARITHMETIC)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub):
            self.add("sign", node, self.source(node.operand))
        self.generic_visit(node)

    @staticmethod
    def number(node: ast.AST) -> bool:
        return isinstance(node, ast.Constant) and type(node.value) in (int, float)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int and node.value < 1000:
            self.add("off by one", node, str(node.value + 1).encode())
        elif self.number(node) and node.value:
            self.add("constant +5 %", node, repr(1.05 * node.value).encode())  # type: ignore[operator]

    def visit_Call(self, node: ast.Call) -> None:
        name = self.source(node.func).decode().rpartition(".")[2]
        plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        if name in UNMUTATED:
            return
        if name in CLAMPS and (isinstance(node.func, ast.Attribute) or len(plain) > 1):
            method = name == "clip" and self.source(node.func) != b"np.clip"
            inside = node.func.value if method and isinstance(node.func, ast.Attribute) else None
            for argument in [inside] if inside else plain[:1] if name == "clip" else plain[:2]:
                if argument is not None and len(plain) > 1 and not self.number(argument):
                    self.add("clamp removed", node, b"(" + self.source(argument) + b")")
        elif len(plain) > 1 and self.source(plain[0]) != self.source(plain[1]):
            (start, middle), (right, end) = self.place(plain[0]), self.place(plain[1])
            new = self.content[right:end] + self.content[middle:right] + self.content[start:middle]
            self.found.append(Mutant("swapped arguments", self.file, start, end, new))
        for keyword in node.keywords:
            if keyword.arg in ("axis", "dim") and self.number(keyword.value):
                self.add("axis", keyword.value, b"1" if self.source(keyword.value) == b"0" else b"0")
        self.generic_visit(node)

    def dropped(self, node: ast.AugAssign | ast.Assign | ast.Expr | ast.Continue | ast.Break) -> None:
        called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        stored = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)
        if called or stored or isinstance(node, ast.AugAssign | ast.Continue | ast.Break):
            self.add("dropped statement", node, b"pass")
        self.generic_visit(node)

    visit_AugAssign = visit_Assign = visit_Expr = visit_Continue = visit_Break = dropped


def all_mutants() -> Iterator[Mutant]:
    """List every mutant of the packages and their data."""
    for package in PACKAGES:
        for path in sorted({*(ROOT / package).rglob("*.py")} - {*(ROOT / package).rglob(SLOW)}):
            yield from Finder(str(path.relative_to(ROOT))).found
    for pattern in DATA:
        for path in sorted(ROOT.glob(pattern)):
            content = path.read_bytes()
            for found in re.finditer(rb"(?<=[\s\[])-?\d+(\.\d+)?([eE][-+]?\d+)?(?=\s*[,\]}\n])", content):
                number = float(found[0]) * 1.05
                whole = b"." not in found[0] and b"e" not in found[0].lower()
                new = repr(max(round(number), int(found[0]) + 1) if whole else number)
                yield Mutant("data +5 %", str(path.relative_to(ROOT)), found.start(), found.end(), new.encode())


def drawn(number: int, seed: int) -> list[Mutant]:
    """Draw mutants, of every kind as many as of the others."""
    rng, kinds = Random(seed), dict[str, list[Mutant]]()
    for mutant in all_mutants():
        kinds.setdefault(mutant.kind, []).append(mutant)
    for mutants in kinds.values():
        rng.shuffle(mutants)
    names = sorted(kinds)
    return [kinds[names[i % len(names)]].pop() for i in range(number)]


class Coverage:
    """Which tests ran which line."""

    def __init__(self, path: Path):
        self.data = coverage.CoverageData(str(path))
        self.data.read()
        self.width: Counter[str] = Counter()  # lines that a test ran
        for file in self.data.measured_files():
            for tests in self.data.contexts_by_lineno(file).values():
                self.width.update(self.names(tests))

    @staticmethod
    def names(contexts: list[str]) -> set[str]:
        return {context.rpartition("|")[0] for context in contexts if "::" in context}

    def tests_of(self, mutant: Mutant) -> list[str]:
        """List the tests that ran a line of the mutant: a few of the narrowest, recorded values, then the others."""
        by_line = self.data.contexts_by_lineno(mutant.file)
        tests = set().union(*(self.names(by_line.get(line, [])) for line in mutant.lines)) | self.of_constant(mutant)
        narrowest = sorted(tests, key=lambda test: (self.width[test], test))
        first, others = narrowest[:FIRST_TESTS], narrowest[FIRST_TESTS:]
        others.sort(key=lambda test: not test.startswith(VALUES))
        return [*first, *others][: MOST_TESTS + sum(test.startswith(VALUES) for test in others)]

    def of_constant(self, mutant: Mutant) -> set[str]:
        """Find the tests that ran a line which names the constant of a module that the mutant changes."""
        for node in ast.parse((ROOT / mutant.file).read_bytes()).body:
            target = getattr(node, "target", None) or getattr(node, "targets", [None])[0]
            if isinstance(target, ast.Name) and node.lineno <= mutant.lines[0] <= (node.end_lineno or 0):
                return set().union(*(self._naming(target.id, file) for file in self.data.measured_files()))
        return set()

    def _naming(self, name: str, file: str) -> set[str]:
        lines, found = (ROOT / file).read_text().splitlines(), re.compile(rf"\b{name}\b")
        naming = [number for number, line in enumerate(lines, start=1) if found.search(line)]
        by_line = self.data.contexts_by_lineno(file) if naming else {}
        return set().union(*(self.names(by_line.get(line, [])) for line in naming))


def tests_of(file: str) -> list[str]:
    """List the test files of a file: recorded values, those that import it, its folder's, recorded answers."""
    parts = Path(file.removeprefix("kernels/")).with_suffix("").parts
    package, name = ".".join(parts[:-1]), parts[-1]
    imported = "" if file.endswith(".json") else rf"(\.{name}\b| import [^\n]*\b{name}\b)"
    imports = re.compile(re.escape(package) + imported)
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "bench"]
    tests.sort(key=lambda path: (path.stat().st_size, path))
    direct = [path for path in tests if imports.search(path.read_text())]
    folder = ROOT / "tests" / ("kernels" if parts[0] == "speckernels" else parts[0]) / Path(*parts[1:-1])
    while not folder.is_dir():
        folder = folder.parent
    near = [path for path in tests if folder in path.parents]
    orders = (path for path in (*direct, *near) if (path in direct and path in near) or name in path.stem)
    chosen = list(dict.fromkeys([*orders, *direct, *near]))[:MOST_FILES]
    last = ["tests/contract/test_commands.py"] * (parts[0] != "speckernels")
    return [VALUES, *(str(path.relative_to(ROOT)) for path in chosen), *last]


def copy_tree(folder: Path) -> Path:
    """Copy the files that git knows or would add."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True)
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(tree: Path, tests: list[str], limit_s: float, cache: Path | None = None) -> tuple[str, str]:
    """Run tests up to the first failure: "killed" and the test, "survived" or "undecided"."""
    log = tree / "mutant.log"
    process = get_context("fork").Process(target=_child, args=(tree, tests, log, cache))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return "undecided", f"after {limit_s:.0f} s, slow or endless"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", log.read_text(errors="replace"), re.MULTILINE)
    if process.exitcode in (0, 5):
        return "survived", ""
    return "killed", failed[1] if failed else f"no test ran to its end ({process.exitcode})"


def _child(tree: Path, tests: list[str], log: Path, cache: Path | None) -> None:
    """Run pytest in a process whose libraries are loaded already, on the tree's code and tests."""
    os.setsid()
    os.chdir(tree)
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(tree), str(tree / "kernels"), *(path for path in sys.path if not path.startswith(str(ROOT)))]
    os.environ["PYTHONPATH"] = f"{tree}{os.pathsep}{tree / 'kernels'}"
    numba.config.CACHE_DIR = str(cache or "")
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def verdict(mutant: Mutant, tree: Path, limit_s: float, known: Coverage) -> tuple[str, str]:
    """Run a mutant's tests in this copy of the tree, which is whole again afterwards."""
    path, old = tree / mutant.file, (ROOT / mutant.file).read_bytes()
    tests = known.tests_of(mutant) or tests_of(mutant.file)
    compiled = b"numba" in old or "/policy/" in mutant.file  # whose callers' compiled code would stay the old
    with tempfile.TemporaryDirectory() as cache:
        path.write_bytes(mutant.text(old))
        try:
            what, why = run_tests(tree, tests, limit_s, Path(cache) if compiled else None)
            files = [*dict.fromkeys(test.partition("::")[0] for test in tests if "::" in test)][:MOST_FILES]
            if what == "survived" and files:  # a fixture that several tests share runs in the first of them alone
                again = run_tests(tree, files, limit_s, Path(cache) if compiled else None)
                what, why = again if again[0] == "killed" else (what, why)
        finally:
            path.write_bytes(old)
        if what == "undecided" and run_tests(tree, tests, limit_s / 3)[0] == "survived":
            return "killed", f"endless: after {limit_s:.0f} s, where the tree as it is takes less than a third"
        return what, why


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100, help="mutants to draw")
    parser.add_argument("--seed", type=int, required=True, help="a fresh one draws fresh mutants")
    parser.add_argument(
        "--coverage", type=Path, required=True, help="of all tests: `pytest --cov --cov-context=test` writes .coverage"
    )
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree to work in")
    parser.add_argument("--limit", type=float, default=240, help="seconds of tests for a mutant")
    options = parser.parse_args()
    mutants, results = drawn(options.number, options.seed), list[tuple[Mutant, str, str]]()
    known = Coverage(options.coverage)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        trees = SimpleQueue[Path]()
        for job in range(options.jobs):
            trees.put(copy_tree(Path(folder, str(job))))

        def judge(mutant: Mutant) -> None:
            tree = trees.get()
            try:
                what, why = verdict(mutant, tree, options.limit, known)
            finally:
                trees.put(tree)
            results.append((mutant, what, why))
            print(f"{len(results):4} {what} {mutant}; {why}", flush=True)

        list(pool.map(judge, mutants))
        killing = sorted({why for _, what, why in results if what == "killed" and "::" in why})
        clean = run_tests(trees.get(), killing, 60 + 20 * len(killing)) if killing else ("survived", "")
    report(results, clean)


def report(results: list[tuple[Mutant, str, str]], clean: tuple[str, str]) -> None:
    """Print the rate by kind, and the survivors."""
    count: Callable[[str], Counter[str]] = lambda what: Counter(m.kind for m, found, _ in results if found == what)  # noqa: E731
    drawn_, killed = Counter(mutant.kind for mutant, *_ in results), count("killed")
    print(
        f"\nkilled {killed.total()} of {drawn_.total()}; the killing tests, on the tree as it is: {clean[0]} {clean[1]}"
    )
    print(", ".join(f"{kind} {killed[kind]} of {drawn_[kind]}" for kind in sorted(drawn_)))
    for mutant, what, why in results:
        if what != "killed":
            print(f"{what}: {mutant}; {why}")


if __name__ == "__main__":
    main()
