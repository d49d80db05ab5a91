"""`python -m paper`."""

import sys

from paper.commands import main

if __name__ == "__main__":
    sys.exit(main())
