"""`python -m tests.fuzz [--count N] [--seed S] [READER...]`: a table of readers, and an exit code of 1 for a failure.

Every reader runs in a process of its own, with a limit of memory, and of CPU time for each file.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.reader import JSON, Reader
from tests.fuzz.readers import READERS

COUNTS = {True: 100_000, False: 20_000}  # mutants of a reader: of JSON, of others
LIMIT_S, LIMIT_BYTES = 5, 2**30
MOST_CHARACTERS = 1000  # of an error
KEPT = 5  # failures that are shown of a reader
MEMORY = Path("/dev/shm")


def mutant(name: str, reader: Reader, valid: dict[str, bytes], seed: int, number: int) -> tuple[str, bytes]:
    """The file that is changed and its content; the same for the same seed and number."""
    rng = Random(f"{seed} {name} {number}")
    file = reader.files[number % len(reader.files)]
    return file, reader.mutate(valid[file], rng)


def outcome(reader: Reader, path: Path, wanted: Any) -> str:
    """ "refused", "accepted", or what is wrong."""
    try:
        found = reader.read(path)
    except reader.refusal as error:
        message = str(error)
        if not message.isprintable():
            return f"an error with line breaks or control characters: {message!r:.200}"
        if len(message) > MOST_CHARACTERS:
            return f"an error of {len(message):,} characters: {message:.200}"
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.200}"
    return "accepted" if not reader.covered or found == wanted else "accepted, but it reads differently"


def prepared(reader: Reader, path: Path) -> tuple[dict[str, bytes], Any]:
    """Write the valid file; the content of those parts that are mutated, and what is read."""
    reader.write(path)
    wanted = reader.read(path)
    return {file: (path / file if file else path).read_bytes() for file in reader.files}, wanted


def fuzz(name: str, count: int, seed: int, folder: Path) -> dict[str, Any]:
    """In this process."""
    reader, path = READERS[name], folder / ("file.zip" if name == "trace, zipped" else "file.json")
    valid, wanted = prepared(reader, path)
    originals = {**valid, **({name: (path / name).read_bytes() for name in ["meta.json"]} if reader.mend else {})}
    warnings.simplefilter("error")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * LIMIT_BYTES,) * 2)
    counts = {"refused": 0, "accepted": 0}
    failures: list[str] = []
    slowest_s, before_bytes = 0.0, peak_bytes()
    with (folder / "number").open("wb", buffering=0) as at:
        for number in range(count):
            at.seek(0)
            at.write(b"%12d" % number)
            for file, content in originals.items():
                (path / file if file else path).write_bytes(content)
            file, content = mutant(name, reader, valid, seed, number)
            (path / file if file else path).write_bytes(content)
            if reader.mend:
                reader.mend(path)
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # ends the process, wherever it is
            start_s = cpu_s()
            found = outcome(reader, path, wanted)
            slowest_s = max(slowest_s, cpu_s() - start_s)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if found in counts:
                counts[found] += 1
            else:
                failures.append(f"mutant {number}: {found}")
    if peak_bytes() - before_bytes > LIMIT_BYTES:
        failures.append(f"{peak_bytes() - before_bytes >> 20} MiB of memory")
    return {**counts, "failures": failures, "slowest_s": slowest_s, "peak_mb": peak_bytes() / 1e6}


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz_apart(name: str, count: int, seed: int) -> dict[str, Any]:
    """In a process of its own, in memory where there is such a folder."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        command = [sys.executable, "-m", "tests.fuzz", name, "--count", str(count), "--seed", str(seed)]
        done = subprocess.run([*command, "--inside", folder], capture_output=True, text=True)
        if done.returncode == 0:
            return dict(json.loads(done.stdout.splitlines()[-1]))
        number = Path(folder, "number").read_text().strip() if Path(folder, "number").is_file() else "none"
        last = (done.stderr.strip() or "nothing said").splitlines()[-1]
        said = f"mutant {number}: ended with {done.returncode} ({last:.200})"
        return {"refused": 0, "accepted": 0, "failures": [said], "slowest_s": 0.0, "peak_mb": 0.0}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("reader", nargs="*", help=f"default: all of {', '.join(READERS)}")
    parser.add_argument(
        "--count", type=int, help=f"mutants of each; default {COUNTS[True]} of JSON, else {COUNTS[False]}"
    )
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        print(json.dumps(fuzz(given.reader[0], given.count, given.seed, given.inside)))
        return 0
    failed = False
    print(f"{'reader':30}{'mutants':>9}{'refused':>9}{'accepted':>9}{'slowest s':>10}{'peak MB':>9}", flush=True)
    for name in given.reader or READERS:
        count = given.count or COUNTS[READERS[name].family == JSON]
        found = fuzz_apart(name, count, given.seed)
        print(
            f"{name:30}{count:9}{found['refused']:9}{found['accepted']:9}{found['slowest_s']:10.3f}"
            f"{found['peak_mb']:9.0f}",
            *(f"    {what}" for what in found["failures"][:KEPT]),
            sep="\n",
            flush=True,
        )
        failed |= bool(found["failures"])
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
