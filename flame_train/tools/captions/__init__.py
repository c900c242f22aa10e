"""Captions for a folder's images, from a server that speaks OpenAI's chat or from a tagger in a local file."""
