"""A person names a function; what is wrong with the name must be said."""

import os
import sys

import pytest

from tfmixed.report.names import import_function
from tfmixed.report.names import name_of
from tfmixed.report.names import suggest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a module in it that no test shares."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_current_folder_is_importable(folder):
    (folder / "mynetworks.py").write_text("def small():\n    return 7\n")
    assert import_function("mynetworks:small", "builder")() == 7


def test_attributes_of_a_class_can_be_named(folder):
    (folder / "holder.py").write_text(
        "class Nets:\n    @staticmethod\n    def small():\n        return 8\n"
    )
    assert import_function("holder:Nets.small", "builder")() == 8


@pytest.mark.parametrize("name", ["mynetworks", ":small", "mynetworks:", ""])
def test_another_form_is_an_error(folder, name):
    with pytest.raises(ValueError, match="Expected `module:function`"):
        import_function(name, "builder")


def test_a_missing_module_is_named_and_the_closest_one_suggested(folder):
    (folder / "mynetworks.py").write_text("")
    with pytest.raises(ValueError, match="no module 'mynetwork' here") as error:
        import_function("mynetwork:small", "builder")
    assert "Did you mean 'mynetworks'?" in str(error.value)
    assert os.fspath(folder) in str(error.value)


def test_a_missing_submodule_is_named(folder):
    with pytest.raises(ValueError, match="no module 'tfmixed.reprot'") as error:
        import_function("tfmixed.reprot:compare", "builder")
    assert "Did you mean 'tfmixed.report'?" in str(error.value)


def test_a_missing_function_is_named_and_the_closest_one_suggested(folder):
    (folder / "mynetworks.py").write_text("def small(): pass\n")
    with pytest.raises(ValueError, match="has no 'smal'") as error:
        import_function("mynetworks:smal", "builder")
    assert "Did you mean 'small'?" in str(error.value)


def test_a_missing_requirement_is_not_taken_for_a_missing_module(folder):
    (folder / "mynetworks.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(
        ValueError, match="'mynetworks' needs 'nowhere_to_be_found'"
    ):
        import_function("mynetworks:small", "builder")


def test_a_module_that_fails_says_how(folder):
    (folder / "broken.py").write_text("raise RuntimeError('no licence')\n")
    with pytest.raises(ValueError, match="RuntimeError: no licence"):
        import_function("broken:small", "data")


def test_a_value_that_is_no_function_is_an_error(folder):
    (folder / "values.py").write_text("small = 3\n")
    with pytest.raises(ValueError, match="is int and cannot be called"):
        import_function("values:small", "builder")


def test_name_of_a_function_can_be_imported_again():
    assert name_of(os.path.join) == ("posixpath:join", None)
    assert import_function(name_of(suggest)[0], "builder") is suggest


def test_name_of_a_lambda_says_why_not():
    name, reason = name_of(lambda: 3)
    assert name is None
    assert "no name that can be imported" in reason


def test_name_of_a_function_in_a_script_says_why_not(monkeypatch):
    monkeypatch.setattr(suggest, "__module__", "__main__")
    name, reason = name_of(suggest)
    assert name is None
    assert reason == "`suggest` is defined in the running script or notebook"
