"""The keys of every text encoder: each has a folder here, whose `encoder.py` declares them."""

from __future__ import annotations

from flame_train.settings import AllOf, entries_in

from .encoder import EncoderKeys

ENCODER_KEYS: AllOf[EncoderKeys] = AllOf(entries_in("flame_train.text_encoders", EncoderKeys))
