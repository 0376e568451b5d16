"""The error that a user can cause."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input. The message is one line: what is wrong, where, what to do.

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
        super().__init__(" ".join(str(message).splitlines()))  # what comes from a file may hold line breaks


class Interrupted(BaseException):
    """Stopped by the user, as KeyboardInterrupt; the message says what is kept and how to go on."""
