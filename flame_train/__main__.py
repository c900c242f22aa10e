"""`python -m flame_train`."""

from __future__ import annotations

from flame_train.cli import main

main()
