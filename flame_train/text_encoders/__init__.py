"""Text encoders: each is one file of this folder, which declares its keys and makes a caption's arrays."""

from __future__ import annotations

from flame_train.settings import entries_in

from .encoder import EncoderKeys, TextEncoder, too_long

ENCODER_KEYS: tuple[type[EncoderKeys], ...] = tuple(entries_in(__name__, EncoderKeys))

__all__ = ["ENCODER_KEYS", "EncoderKeys", "TextEncoder", "too_long"]
