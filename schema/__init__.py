"""The TFLite file format: tables as data, a bounded reader and a streaming writer."""
