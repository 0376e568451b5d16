"""Simulator of speculative decoding: trace -> policy -> replay -> cost -> speedup.

Import the room you need (`specsim.trace`, `specsim.replay`, ...); importing the package
itself loads nothing heavy.
"""

__version__ = "0.1.0"
