"""What the commands do besides training: one file a command."""
