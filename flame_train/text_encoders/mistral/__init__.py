"""Mistral Small as a text encoder."""
