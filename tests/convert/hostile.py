"""A value whose pickle runs a program, which no reader here may do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)
