"""Settings of the environment that end a command which runs the kernels, found before it does anything."""

from __future__ import annotations

import importlib

from megasetup.cli.errors import CommandError


def check_kernels() -> None:
    """Have the CPU kernels chosen, which MEGASETUP_CPU_ISA may make impossible.

    Raises:
        CommandError: it names kernels that cannot run here.
    """
    try:
        importlib.import_module("megasetup._C").cpu.instruction_set()
    except ImportError:
        return  # (whoever runs plain torch instead says so)
    except ValueError as error:
        raise CommandError(str(error)) from error
