"""The commands over a config: the stages in a row, a part of them, or what they say of a run before it begins."""
