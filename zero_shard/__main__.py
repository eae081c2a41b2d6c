"""``python -m zero_shard``."""

import sys

from zero_shard.cli import main

sys.exit(main())
