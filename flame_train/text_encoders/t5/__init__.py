"""T5's encoder: network, names in files, tokenizer, encoder."""
