"""`flame-train quickstart`: a whole small run from nothing."""
