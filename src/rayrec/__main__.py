"""`python -m rayrec` is the command `rayrec`."""

from rayrec.cli import main

if __name__ == "__main__":
    main()
