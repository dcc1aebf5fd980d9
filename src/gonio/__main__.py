"""`python -m gonio` is the program `gonio`."""

from gonio.cli import main

if __name__ == "__main__":
    main()
