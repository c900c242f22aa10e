"""`python armed.py POINTS ARGUMENT...`: the program with failpoints armed, which it cannot do by itself."""

from __future__ import annotations

import sys

from flame_train import cli
from flame_train.disk import failpoint

if __name__ == "__main__":
    failpoint.arm(sys.argv.pop(1))
    cli.main()
