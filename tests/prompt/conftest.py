"""Makes the test tokenizers available to every test of this folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# Tests are imported by path (importmode=importlib), so a module beside them has to be loaded by hand, once.
_NAME = "tokenizers_for_tests"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name(f"{_NAME}.py"))
    assert _spec is not None and _spec.loader is not None
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])
