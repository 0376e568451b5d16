"""What engines and benchmarks wrote, as traces, rounds or counters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.acceptance.sources import describe
from specsim.engines.formats.imported import Imported
from specsim.engines.formats.registry import read_format
from specsim.engines.formats.written import summary, write_imported
from specsim.errors import InputError
from specsim.speedup.result import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class ImportedRecords(Result, Imported):
    """An engine's records, see `Imported` for its fields; `source` is a trace, rounds or counters, or None."""

    @property
    def holds(self) -> str:
        """What the files give: "dense trace", "rounds", "counters", or "sums alone"."""
        return "sums alone" if self.source is None else str(describe(self.source)["source"])

    def __repr__(self) -> str:
        return f"{self.holds} of {self.engine} {self.version}".rstrip()

    def to_frame(self) -> pd.DataFrame:
        """A table of acceptance as the engine defines and prints it, beside specsim's; a row each."""
        import pandas as pd  # slow to import

        return pd.DataFrame(summary(self)["printed"], columns=["quantity", "engine", "printed", "value", "formula"])

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: sums, averages, definitions, notes, and what was skipped; not the rounds themselves."""
        return {"holds": self.holds, **summary(self)}

    def write(self, path: str | PathLike[str], *, overwrite: bool = False) -> None:
        """Write them for other commands: a trace folder, rounds as .parquet or AIPerf's .jsonl, counters as .json."""
        path = Path(path)
        if path.exists() and not overwrite:
            raise InputError(f"{path} exists; choose another name or overwrite it")
        write_imported(self, path, overwrite=overwrite)


def import_records(kind: str, files: str | PathLike[str] | Iterable[str | PathLike[str]]) -> ImportedRecords:
    """Read what an engine logged or exported about speculation.

    Parameters
    ----------
    kind : str
        What the files are, such as "vllm-log", "llamacpp-log" or "prometheus"; `specsim import --help` has all.
    files : str, Path, or several
        Files of this kind, in their order.

    Returns
    -------
    ImportedRecords
        `source` is a trace, rounds or counters, None where the files hold sums alone; `notes` say what they do not
        tell; `write(path)` keeps it for the commands, and `advise`, `diagnose` and `export_flags` take it as it is.

    Raises
    ------
    InputError
        For an unknown kind, and files of another kind.

    Examples
    --------
    >>> import json, pathlib, tempfile, specsim
    >>> log = {"timings": {"draft_n": 40, "draft_n_accepted": 25, "predicted_n": 36}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "responses.jsonl")
    ...     _ = file.write_text(json.dumps(log))
    ...     records = specsim.import_records("llamacpp-responses", file)
    >>> records
    sums alone of llamacpp
    >>> records.to_dict()["averages"]["accepted / drafted"]
    0.625
    """
    paths = [files] if isinstance(files, str | PathLike) else list(files)
    return ImportedRecords(**vars(read_format(kind, [Path(path) for path in paths])))
