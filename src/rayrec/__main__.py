"""Entry point of `python -m rayrec` and of the `rayrec` command."""

import signal
import sys
from typing import NoReturn

from rayrec.cluster.process_end import stop_signals


def main() -> NoReturn:
    """Run one command and exit with its status."""
    if sys.argv[1:2] == ["serve"]:
        # Imports take a moment, in which Ctrl-C would end with a traceback. `rayrec.serve.shutdown`
        # receives these signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    from rayrec.cli import main as run

    run()


if __name__ == "__main__":
    main()
