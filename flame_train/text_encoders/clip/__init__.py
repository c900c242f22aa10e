"""CLIP's text half: network, names in files, tokenizer, encoder."""
