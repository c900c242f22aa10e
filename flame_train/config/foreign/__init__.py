"""Configs of other trainers: a table for each, recognising them, reading them, and converting them into ours."""
