"""Entry point of `python -m selfspec`: runs the `selfspec` command."""

from selfspec.cli import main

if __name__ == "__main__":
    main()
