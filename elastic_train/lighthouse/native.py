"""torchft's compiled part by itself.

The Lighthouse needs nothing else of torchft, whose Python part imports torch: seconds that replicas would wait for
whenever the Lighthouse is started again, and hundreds of megabytes.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from types import ModuleType

_NAME = "torchft._torchft"


def load_native() -> ModuleType:
    """The module ``torchft._torchft``, as ``torchft/_torchft.pyi`` describes it.

    Raises:
        ImportError: torchft is not installed, or is built in another way.
    """
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    package = importlib.util.find_spec("torchft")
    folders = (package.submodule_search_locations or []) if package is not None else []
    for path in (Path(folder) / f"_torchft{suffix}" for folder in folders for suffix in EXTENSION_SUFFIXES):
        if path.exists():
            loader = ExtensionFileLoader(_NAME, str(path))
            spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
            assert spec is not None, "a loader was given"
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
            sys.modules[_NAME] = module
            return module
    raise ImportError("torchft has no compiled part: install the version of constraints.txt", name=_NAME)
