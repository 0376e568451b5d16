"""Simulator of speculative decoding: trace -> policy -> replay -> cost -> speedup.

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specsim.errors import InputError
    from specsim.policy.base import setting
    from specsim.policy.chain.base import ChainPolicy
    from specsim.policy.tree.base import TreePolicy

__version__ = "0.1.0"

_HOMES = {  # public name -> module that defines it
    "ChainPolicy": "specsim.policy.chain.base",
    "InputError": "specsim.errors",
    "TreePolicy": "specsim.policy.tree.base",
    "setting": "specsim.policy.base",
}
__all__ = ["ChainPolicy", "InputError", "TreePolicy", "setting"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specsim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
