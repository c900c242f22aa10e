"""Sequences of ops that networks use often, as one op each."""
