"""edge-opt: rewrites the attention of TFLite language models for edge NPUs."""
