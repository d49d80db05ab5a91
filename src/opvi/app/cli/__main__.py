"""`python -m opvi.app.cli`."""

import sys

from opvi.app.cli import main

sys.exit(main())
