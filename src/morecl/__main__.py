"""The command ``morecl``, also as ``python -m morecl``."""

import sys


def main() -> None:
    """Call the command line. Ctrl-C while that is imported ends as it does later, without a traceback."""
    try:
        from morecl.cli import main as command
    except KeyboardInterrupt:
        sys.exit(130)  # cli.terminal.INTERRUPTED
    command()


if __name__ == "__main__":
    main()
