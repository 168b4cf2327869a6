"""Where models come from and where they go: litert-torch, and LiteRT's ahead-of-time pipeline."""
