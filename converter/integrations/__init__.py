"""Where edge-opt is a part of somebody else's pipeline."""
