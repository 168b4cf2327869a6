"""The TFLite file format: tables as data, a bounded reader and a streaming writer.

It must not know what operators mean.
"""

from edge_opt.schema.data import Data
from edge_opt.schema.reader import read_model
from edge_opt.schema.table import TABLES, UNIONS, Table, new_table, vector
from edge_opt.schema.writer import model_bytes

__all__ = [
    "TABLES",
    "UNIONS",
    "Data",
    "Table",
    "model_bytes",
    "new_table",
    "read_model",
    "vector",
]
