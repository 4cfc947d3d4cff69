"""`python -m striped_attention.cli` is the command `striped`."""

import sys

from striped_attention.cli import main

sys.exit(main())
