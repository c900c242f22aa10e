"""The version of flame-train, below everything that writes it down."""

from typing import Final

__version__: Final = "0.1.0"
