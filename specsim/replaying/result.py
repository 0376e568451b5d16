"""Base class of the results of public functions."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


class Result:
    """A result with `to_frame()` and `as_dict()`, which a notebook shows as a table with its notes and warnings."""

    if TYPE_CHECKING:

        def to_frame(self) -> pd.DataFrame: ...

        def as_dict(self) -> dict[str, Any]: ...

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, which the command prints with --json: plain numbers, units as in the names."""
        return self.as_dict()

    def _repr_html_(self) -> str:
        remarks = [*getattr(self, "notes", ()), *getattr(self, "warnings", ())]
        table = self.to_frame().to_html(max_rows=60, float_format="{:.3f}".format, na_rep="")
        return table + "".join(f"<p>{escape(remark)}</p>" for remark in remarks)
