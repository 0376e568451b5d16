"""Errors that a user can cause."""

from __future__ import annotations

from specsim.io.printable import one_line


class InputError(ValueError):
    """Bad input. The message is a single printable line: what is wrong, where, what to do.

    Examples
    --------
    >>> import specsim
    >>> try:
    ...     specsim.make_policy("fixed_k", {"k": -1})
    ... except specsim.InputError as error:
    ...     print(error)
    policy fixed_k: k=-1 is outside [1, 256]; choose a value inside
    """

    def __init__(self, message: object = ""):
        super().__init__(one_line(str(message)))  # it may quote a file


class Interrupted(BaseException):
    """Stopped by the user, as KeyboardInterrupt; the message says what is kept and how to go on."""
