"""A run in five stages, a module each: `check`, `plan`, `encode`, `train`, `finish`.

Each takes the value of the one before and looks back at none. `commands.stages` puts them in a row.
"""
