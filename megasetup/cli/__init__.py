"""The command line: doctor, bench and demo.

It stands on top of everything else, and nothing imports it. This file holds the entry point alone, so that importing
the package stays cheap; the commands are declared in app.py and each loads what it needs when it is called.
"""


def main() -> None:
    """Run the command line with sys.argv; the exit status goes to the shell."""
    from megasetup.cli.app import app

    app(prog_name="megasetup")
