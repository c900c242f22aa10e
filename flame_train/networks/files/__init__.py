"""How the files of a model are identified and opened, and where each weight is read."""
