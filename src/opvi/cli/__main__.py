"""`python -m opvi.cli`."""

import sys

from opvi.cli import main

sys.exit(main())
