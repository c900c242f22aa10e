"""Name tables between published checkpoint layouts and the models' own names, one family a file."""
