"""Entry point of `python -m rayrec`, the same as the `rayrec` command."""

from rayrec.cli import main

if __name__ == "__main__":
    main()
