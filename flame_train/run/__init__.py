"""A run in five stages, a module each: `check`, `plan`, `encode`, `train`, `finish`.

Each takes the value of the one before and looks back at none. `command` puts them in a row.
"""
