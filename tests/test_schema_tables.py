"""The generated tables agree with the installed bindings; in memory, present and absent stay apart."""

import numpy as np
import pytest
from make_tables import generate

from edge_opt.schema import TABLES, UNIONS, Data, new_table, vector
from edge_opt.schema.table import TABLES_FILE


def test_tables_agree_with_the_installed_bindings() -> None:
    """Where the schema is newer, write them again with `python testdata/make_tables.py`."""
    assert TABLES_FILE.read_text(encoding="utf-8") == generate()


def test_no_table_nests_in_itself_so_the_schema_bounds_the_depth() -> None:
    def depth(name: str, above: tuple[str, ...]) -> int:
        assert name not in above
        below = [0]
        for field in TABLES[name].fields:
            children = UNIONS.get(field.element, {0: field.element}).values()
            below += [depth(child, (*above, name)) for child in children if child in TABLES]
        return 1 + max(below)

    assert depth("Model", ()) <= 8


def test_absent_fields_have_the_schema_default() -> None:
    tensor = new_table("Tensor")
    assert tensor.get("is_variable") is False
    assert tensor.get("shape") is None
    assert new_table("OperatorCode").get("version") == 1


def test_present_with_the_default_is_not_absent() -> None:
    tensor = new_table("Tensor", buffer=0)
    assert tensor.has("buffer")
    assert not tensor.has("type")


def test_an_unknown_field_is_a_key_error() -> None:
    tensor = new_table("Tensor")
    for use in (tensor.get, tensor.has, lambda name: tensor.set(name, 1)):
        with pytest.raises(KeyError):
            use("shap")


def test_setting_none_makes_a_field_absent() -> None:
    tensor = new_table("Tensor", name="x")
    tensor.set("name", None)
    assert tensor.fields == {}


def test_a_union_takes_its_type_along() -> None:
    operator = new_table("Operator", builtin_options=new_table("ReshapeOptions", new_shape=[2, 3]))
    assert operator.get("builtin_options_type") == 17
    operator.set("builtin_options", None)
    assert operator.fields == {}
    with pytest.raises(KeyError):
        operator.set("builtin_options", new_table("Tensor"))


def test_lists_of_numbers_become_read_only_arrays() -> None:
    shape = new_table("Tensor", shape=[1, 2]).get("shape")
    assert shape.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        shape[0] = 3
    assert vector("bool", [True]).dtype == np.bool_


def test_a_copy_does_not_change_the_original() -> None:
    tensor = new_table("Tensor", name="x")
    tensor.copy().set("name", "y")
    assert tensor.get("name") == "x"


def test_data_in_memory_is_the_little_endian_bytes() -> None:
    data = Data(np.array([[1, 2]], ">i2"))
    assert bytes(data.view()) == b"\1\0\2\0"
    assert (data.length, len(data), data.external) == (4, 4, False)
    with pytest.raises(ValueError, match="read-only"):
        data.view()[0] = 1
