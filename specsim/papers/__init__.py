"""The five papers' tables as data, and an audit that recomputes what they say from one another."""

from specsim.papers.audit import finding, findings
from specsim.papers.record import Finding
from specsim.papers.tables import Row, Table, read_table, table_names

__all__ = ["Finding", "Row", "Table", "finding", "findings", "read_table", "table_names"]
