"""pytest collects *.claims.toml: every claim is a test. `pytest --claims-update` updates the files.

A claim whose policy is a FILE.py runs that file; files outside the working tree only with --allow-policy-files.

Installed with specsim as a plugin; it imports nothing of specsim before a claim file is met.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from specsim.claims.claim import Claim


class ClaimFailed(Exception):
    """A claim that lacks its known verdict; the message is a line."""


class ClaimItem(pytest.Item):
    """One claim."""

    def __init__(self, *, claim: Claim, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.claim = claim

    def runtest(self) -> None:
        from specsim.claims.check import check, check_policy_files
        from specsim.claims.files import update_expected

        check_policy_files(self.claim, allowed=self.config.getoption("--allow-policy-files"))
        checked = check(self.claim)
        if checked.passed:
            return
        statement = self.claim.statement
        if self.config.getoption("--claims-update") and statement.expected is not None and checked.judged is not None:
            update_expected(self.path, {self.claim.name: checked.interval or checked.judged})
            return
        raise ClaimFailed(checked.message)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *arguments: Any, **others: Any) -> Any:
        from specsim.io.errors import InputError
        from specsim.io.printable import printable

        if isinstance(excinfo.value, ClaimFailed | InputError):
            return printable(str(excinfo.value))
        return super().repr_failure(excinfo, *arguments, **others)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"claim {self.name}"


class ClaimFile(pytest.File):
    """A file of claims."""

    def collect(self) -> Iterable[ClaimItem]:
        from specsim.claims.files import read_claims
        from specsim.io.errors import InputError

        try:
            claims = read_claims(self.path)
        except InputError as error:
            raise self.CollectError(str(error)) from None
        for claim in claims:
            yield ClaimItem.from_parent(self, name=claim.name, claim=claim)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("specsim")
    group.addoption(
        "--claims-update",
        action="store_true",
        help="Write the recomputed values into the `expected` of claims that do not hold.",
    )
    group.addoption(
        "--allow-policy-files",
        action="store_true",
        help="Let claims run policy files (Python programs) outside the working tree.",
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> ClaimFile | None:
    if file_path.name.endswith(".claims.toml"):
        return ClaimFile.from_parent(parent, path=file_path)
    return None
