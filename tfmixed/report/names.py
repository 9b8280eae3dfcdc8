"""Finds what a person names as `module:function`, or says why it cannot."""

import difflib
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any


def import_function(name: str, role: str) -> Callable[..., Any]:
    """Imports what `module:function` names.

    The current folder is importable, as with uvicorn.

    Args:
        name: for example `"models.convnet:convnet"`.
        role: what the caller wants it for, for messages: `"builder"`.

    Returns:
        The function.

    Raises:
        ValueError: the name has another form, there is no such module or no
            such function in it, or the module cannot be imported.
    """
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise ValueError(
            f"`{role}` got {name!r}. Expected `module:function`, for example "
            "`models.convnet:convnet`."
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    value = _import_module(module_name, name, role)
    for attribute in path.split("."):
        if not hasattr(value, attribute):
            raise ValueError(
                f"`{role}` got {name!r}, but the module {module_name!r} has "
                f"no {path!r}."
                + suggest(attribute, _functions(value))
                + " Pass the name of a function that is in it."
            )
        value = getattr(value, attribute)
    if not callable(value):
        raise ValueError(
            f"`{role}` got {name!r}, which is {type(value).__name__} and "
            "cannot be called. Expected a function."
        )
    return value


def name_of(function: Callable[..., Any]) -> tuple[str | None, str | None]:
    """Finds a name under which a fresh process can import a function.

    Args:
        function: any callable.

    Returns:
        `(name, None)` with a name `module:function`, or `(None, reason)`.
    """
    module_name = getattr(function, "__module__", None)
    path = getattr(function, "__qualname__", None)
    label = path or repr(function)
    if module_name == "__main__":
        return None, f"`{label}` is defined in the running script or notebook"
    value: Any = sys.modules.get(module_name or "")
    for attribute in (path or "").split("."):
        value = getattr(value, attribute, None)
    if path is None or value is not function:
        return None, f"`{label}` has no name that can be imported"
    return f"{module_name}:{path}", None


def suggest(word: str, choices: Iterable[str]) -> str:
    """Words a hint at the closest choice, or nothing.

    Args:
        word: what was written.
        choices: what could have been meant.

    Returns:
        `" Did you mean 'x'?"`, with its leading space, or `""`.
    """
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _import_module(module_name: str, name: str, role: str) -> Any:
    try:
        # What was written a moment ago must be seen too.
        importlib.invalidate_caches()
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise ValueError(
                f"`{role}` got {name!r}, but there is no module "
                f"{missing!r} here."
                + suggest(missing, _siblings(missing))
                + f" Start from the folder that holds it (this is "
                f"{os.getcwd()!r}) or install it."
            ) from None
        raise ValueError(
            f"`{role}` got {name!r}, but the module {module_name!r} needs "
            f"{missing!r}, which is not installed. Install it."
        ) from error
    except Exception as error:
        raise ValueError(
            f"`{role}` got {name!r}, but importing {module_name!r} failed "
            f"with {type(error).__name__}: {error}. Make it importable."
        ) from error


def _functions(value: Any) -> list[str]:
    return [
        name
        for name in dir(value)
        if not name.startswith("_") and callable(getattr(value, name, None))
    ]


def _siblings(module_name: str) -> list[str]:
    """Lists the modules that could have been meant instead of a missing one."""
    parent, _, _ = module_name.rpartition(".")
    if parent:
        path = list(getattr(sys.modules.get(parent), "__path__", []))
    else:
        path = [os.getcwd()]
    prefix = f"{parent}." if parent else ""
    return [prefix + module.name for module in pkgutil.iter_modules(path)]
