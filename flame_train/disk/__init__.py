"""Writing that survives: held folders, locks, temporary files, and disk trouble told in a sentence."""
