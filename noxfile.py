"""Tasks: `nox -s demo` runs the main job, `nox -s tests` the tests. Each sets up all it needs."""

from __future__ import annotations

import nox

nox.options.sessions = ["lint", "tests"]
nox.options.reuse_existing_virtualenvs = True


def install(session: nox.Session, *extras: str) -> None:
    """The package with these extras, at the exact versions of constraints.txt."""
    session.install("-c", "constraints.txt", "-e", f".[{','.join(extras)}]")


@nox.session
def demo(session: nox.Session) -> None:
    """The main job on the embedded lab: record, profile, tune, predict, decode, compare."""
    install(session, "real")
    session.run("realrun", "validate", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The default tests: a process per core, then alone those that measure time."""
    install(session, "real", "dev")
    one_thread = {"OMP_NUM_THREADS": "1"}
    together = ("-n", "auto", "--dist", "loadfile", "-m", "not slow and not alone")
    session.run("pytest", *together, *session.posargs, env=one_thread)
    alone = ("-m", "alone and not slow")
    session.run("pytest", *alone, *session.posargs, env=one_thread, success_codes=[0, 5])  # 5: none was selected


@nox.session
def slow(session: nox.Session) -> None:
    """The long tests that the default run leaves out."""
    install(session, "real", "dev")
    session.run("pytest", "-m", "slow", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, and who may import whom."""
    install(session, "real", "dev")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks of the simulator, with the ratio to a plain reference, and of the kernels."""
    install(session, "real", "dev")
    session.run("pytest", "tests", "kernels/benchmarks", "--benchmark-only", "-s", *session.posargs)
