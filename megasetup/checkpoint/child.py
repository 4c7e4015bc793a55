"""What a conversion in a process of its own runs: the job comes in on standard input, one word goes out.

A pickle, because layer specs are Python objects; it comes from the parent process and from nowhere else.
"""

from __future__ import annotations

import logging
import pickle
import sys

from megasetup.checkpoint.once import import_alone


def main() -> None:
    """Read the job, convert, and write "converted" or "there" to what was standard output."""
    answer = sys.stdout
    sys.stdout = sys.stderr  # (what Bridge prints is a message, not the answer)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    conversion, target, force = pickle.load(sys.stdin.buffer)
    converted = import_alone(conversion, target, force=force)
    answer.write("converted\n" if converted else "there\n")
    answer.flush()


if __name__ == "__main__":
    main()
