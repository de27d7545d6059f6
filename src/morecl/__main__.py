"""``python -m morecl`` is the command ``morecl``."""

from morecl.cli import main

if __name__ == "__main__":
    main()
