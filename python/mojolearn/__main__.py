# SPDX-License-Identifier: Apache-2.0
"""`python -m mojolearn` is the command line."""

import sys

from ._cli import main

sys.exit(main())
