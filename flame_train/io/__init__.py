"""Files: the safetensors reader and writer, weights folders, name maps between layouts."""
