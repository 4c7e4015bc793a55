"""The one exception that a command turns into a message without a traceback."""


class CommandError(RuntimeError):
    """Something the user can mend: the message names the thing, its value and the remedy."""
