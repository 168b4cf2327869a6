"""Two models compared: their outputs on real inputs, whole runs, the text that they generate, and recorded results."""
