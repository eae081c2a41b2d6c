"""Print a list of setup.py's settings, one a line, without importing or building anything."""

import ast
import sys
from pathlib import Path

for node in ast.parse((Path(__file__).parent.parent / "setup.py").read_text(encoding="utf-8")).body:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == sys.argv[1]:
        print("\n".join(ast.literal_eval(node.value)))
