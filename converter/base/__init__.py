"""What edge-opt says and writes: errors, sentences, JSON, HTML, and files written whole. It knows nothing of models."""
