"""Measurements of the engine's ops, and the same steps in PyTorch. A checkout has them; the wheel has not.

`flame-train bench ops` and `bench step --against torch` take them from here (`flame_train/tools/bench/checkout.py`).
"""
