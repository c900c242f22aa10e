"""The commands of `flame-train`, and how their arguments are read and their results shown."""
