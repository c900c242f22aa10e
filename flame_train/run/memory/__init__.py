"""The memory and the time that a run will take, and the settings by which it keeps within a budget."""
