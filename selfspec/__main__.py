"""`python -m selfspec`: the command. Knows nothing of what it does."""

from selfspec.cli import main

if __name__ == "__main__":
    main()
