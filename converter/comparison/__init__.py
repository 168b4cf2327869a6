"""Compare models: outputs on realistic inputs, converted models as a whole, generated text, and golden files."""
