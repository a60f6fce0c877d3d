"""`python -m lowtide` is the command `lowtide`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
