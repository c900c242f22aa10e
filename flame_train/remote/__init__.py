"""Run folders and inputs on other machines, through fsspec, which is imported only where a config asks for it."""
