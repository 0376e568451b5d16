"""How large the columns of a Parquet file are, from its footer alone.

pyarrow knows it as well, but asked for the chunks of a damaged footer it ends the whole process (26.0: the exception
passes a C++ function that may not throw). The footer is Thrift's compact protocol: https://thrift.apache.org/docs/, and
https://github.com/apache/parquet-format for the numbers of the fields.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

VALUE_BYTES = 8  # of a value in memory, at most; text is shared among equal values
TAIL_BYTES = 8  # length of the footer, and PAR1
ROWS, GROUPS = 3, 4  # fields of the footer
CHUNKS, GROUP_ROWS = 1, 3  # of a group of rows
ABOUT = 3  # of a chunk, a column's part of a group
PATH, VALUES, UNCOMPRESSED = 3, 5, 6  # of what is said about a chunk


def unpacked_bytes(path: Path, columns: Collection[str]) -> int:
    """What these columns take in memory; ValueError where the footer does not say."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - TAIL_BYTES, 0))
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(size - TAIL_BYTES - length, 0))
        footer = file.read(length)
    try:
        fields = _Compact(footer).struct()
        rows = [abs(group[GROUP_ROWS]) for group in fields[GROUPS]]
        chunks = [chunk[ABOUT] for group in fields[GROUPS] for chunk in group[CHUNKS]]
        read = [one for one in chunks if one[PATH][0].decode() in columns]
        values = max(sum(abs(one[VALUES]) for one in read), max(sum(rows), abs(fields[ROWS])) * len(columns))
        return int(values * VALUE_BYTES + sum(abs(one[UNCOMPRESSED]) for one in read))
    except (IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"a footer that is damaged: {error!r}") from None


class _Compact:
    """Thrift's compact protocol; a struct is a dictionary by the numbers of its fields."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def struct(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            found[number] = kind == 1 if kind in (1, 2) else self._value(kind)
        return found

    def _value(self, kind: int) -> Any:
        if kind in (1, 2, 3):  # in a list, a flag is a byte
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 7:
            return self._bytes(8)
        if kind == 8:
            return self._bytes(self._unsigned())
        if kind in (9, 10):
            head = self._byte()
            count = self._unsigned() if head >> 4 == 15 else head >> 4
            return [self._value(head & 15) for _ in range(count)]
        if kind == 11:
            kinds = self._byte() if (count := self._unsigned()) else 0
            return [(self._value(kinds >> 4), self._value(kinds & 15)) for _ in range(count)]
        if kind == 12:
            return self.struct()
        raise KeyError(f"type {kind}")

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _bytes(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self.data):
            raise IndexError("it ends early")
        return self.data[self.at - count : self.at]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise IndexError("a number without end")

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
