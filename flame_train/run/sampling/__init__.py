"""Sampling as a config asks for it: what is drawn, and how."""
