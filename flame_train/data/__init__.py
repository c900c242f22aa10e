"""Images and captions: reading, checking, bucketing, ordering, tokenizing, caching.

Nothing here knows a model: what needs one (latents, text embeddings) hands `cache.DiskCache` a function.
"""
