"""`python -m megasetup` is the same as `megasetup`, for environments whose scripts are not on PATH."""

from megasetup.cli import main

if __name__ == "__main__":
    main()
