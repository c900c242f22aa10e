"""Text to token ids, one file a tokenizer."""
