"""Run a notebook's cells in order and keep what they show: `python -m tools.notebook FILE`.

The cells are plain Python, so that no kernel is needed: they share one namespace, and the value of
a cell's last expression is shown as a notebook shows it, in HTML where it has a table.
"""

from __future__ import annotations

import ast
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its cells. A cell that raises ends it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [
        {**cell, **_outputs(number, "".join(cell["source"]), names)}
        if cell["cell_type"] == "code"
        else cell
        for number, cell in enumerate(notebook["cells"], 1)
    ]
    count = 0
    for cell in cells:
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"] = count
            for output in cell["outputs"]:
                if output["output_type"] == "execute_result":
                    output["execution_count"] = count
    return {**notebook, "cells": cells}


def _outputs(number: int, source: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a cell: what it printed, and the value of its last expression."""
    tree = ast.parse(source, f"cell {number}")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        outputs.append({"output_type": "execute_result", "metadata": {}, "data": _shown(value)})
    return {"outputs": outputs}


def _shown(value: Any) -> dict[str, list[str]]:
    shown = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        shown["text/html"] = value._repr_html_().splitlines(keepends=True)
    return shown


def main() -> int:
    place = Path(sys.argv[1])
    notebook = executed(json.loads(place.read_text(encoding="utf-8")))
    place.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
