"""Anima: a denoiser after Cosmos-Predict2, and what makes its text of Qwen3's states and T5's token ids."""
