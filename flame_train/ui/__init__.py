"""The window: pages on which a run is set up, beside those of `show` that watch it. It needs the extra `show`."""
