"""Deliberately broken kernels, which an operation's own check must catch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import speckernels
from speckernels.runtime import build

KERNELS = Path(speckernels.__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """A kernel source with a text replaced.

    file : "csrc/..." below `kernels/`, or "ops/..." below `kernels/speckernels/`
    find : occurs exactly once in it
    why : the bug it stands for
    """

    file: str
    find: str
    replace: str
    why: str

    @property
    def in_cuda(self) -> bool:
        return self.file.startswith("csrc/")

    def text(self) -> str:
        """The broken source."""
        text = ((KERNELS if self.in_cuda else KERNELS / "speckernels") / self.file).read_text()
        assert text.count(self.find) == 1, f"{self.file} holds {self.find!r} {text.count(self.find)} times"
        return text.replace(self.find, self.replace)

    def break_csrc(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        """CUDA sources are built from a copy in which this source is broken."""
        shutil.copytree(KERNELS / "csrc", folder / "csrc")
        (folder / self.file).write_text(self.text())
        patch.setattr(build, "source_folder", lambda: folder / "csrc")
        patch.setenv("SPECKERNELS_CACHE", str(folder / "cache"))
