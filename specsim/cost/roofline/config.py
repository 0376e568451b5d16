"""A model's config.json, in which every family has keys of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specsim.cost.roofline.shape import MAX_SIZE
from specsim.io.errors import InputError
from specsim.io.json import checked

INVALID = "give a decoder's config.json as Hugging Face has it"


class ModelConfig(Mapping[str, Any]):
    """The keys of a config.json, or of an object in it. name : the model's"""

    def __init__(self, keys: Mapping[str, Any], name: str = "inline"):
        self._keys, self.name = dict(keys), name

    @classmethod
    def from_json(cls, data: Any, name: str) -> ModelConfig:
        """Take the parsed file; InputError where it is not an object."""
        return cls(checked(data, f"architecture {name}", dict[str, Any], invalid=INVALID), name)

    @property
    def where(self) -> str:
        """The name in errors."""
        return f"architecture {self.name}"

    def __getitem__(self, key: str) -> Any:
        return self._keys[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __or__(self, other: Mapping[str, Any]) -> ModelConfig:
        return ModelConfig({**self._keys, **other}, self.name)

    def inner(self, key: str) -> ModelConfig:
        """The object under a key; empty where there is none."""
        value = self.get(key)
        return ModelConfig(value if isinstance(value, Mapping) else {}, self.name)

    def size(self, *keys: str, default: int | None = None) -> int:
        """The whole number under the first of these keys that has a value; InputError for anything else."""
        value = next((self[key] for key in keys if self.get(key) is not None), default)
        if isinstance(value, list) and value and len(set(value)) == 1:  # the same size for each layer
            value = value[0]
        if type(value) is not int or not 0 <= value < MAX_SIZE:
            raise InputError(f"{self.where} has no {keys[0]} that is a whole number; {INVALID}")
        return value

    def listed(self, key: str, kind: Any = str) -> list[Any]:
        """The list under a key; empty if the key is missing."""
        value = self.get(key)
        if value is None or (key == "moe_layer_freq" and not isinstance(value, list)):
            return []
        return list(checked(value, f"{self.where}: {key}", list[kind], invalid=INVALID))
