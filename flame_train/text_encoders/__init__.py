"""Text encoders: each is a folder, of which `encoder.py` declares its keys and makes a caption's arrays."""
