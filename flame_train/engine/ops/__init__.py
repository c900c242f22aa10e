"""The operations, one idea a file; `functional.py` is the public list."""
