"""Qwen3 and Qwen3-VL: network, vision tower, names in files, tokenizer, encoders."""
