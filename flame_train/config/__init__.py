"""Configuration: `schema` says which keys exist, `load` reads a file, `render` writes one."""
