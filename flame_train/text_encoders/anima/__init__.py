"""Anima's text encoder: Qwen3, and the adapter that reads its states beside T5's token ids."""
