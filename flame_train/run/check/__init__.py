"""Stage 1, check: a config file to settings and an opened model, or one report of everything wrong."""
