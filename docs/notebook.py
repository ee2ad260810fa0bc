"""Run the notebooks of examples/ in this process, without a kernel, and write the outputs of their cells.

    python docs/notebook.py            # run and write
    python docs/notebook.py --check    # exit with 1 if a saved notebook is not what would be written

A test makes the same comparison. What the last line of a cell is worth is its output.
"""

from __future__ import annotations

import ast
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = (EXAMPLES / "tour.ipynb",)


def run_notebook(path: Path) -> str:
    """Return the text of a notebook with the outputs of its cells, run one after another."""
    notebook = json.loads(path.read_text("utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(cells, 1):
        cell |= {"execution_count": count, "outputs": _outputs("".join(cell["source"]), names, count)}
    return json.dumps(notebook, indent=1) + "\n"


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell and return what it prints and what its last line is worth."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    value, printed = None, io.StringIO()
    with redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        data = {"text/plain": _lines(repr(value)[:2000])}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = _lines(value._repr_html_())
        outputs.append(
            {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}
        )
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> int:
    """Write or check all notebooks. Returns the exit status."""
    status = 0
    for path in NOTEBOOKS:
        text = run_notebook(path)
        if "--check" not in sys.argv:
            path.write_text(text, "utf-8")
        elif path.read_text("utf-8") != text:
            print(f"{path} is not what its cells give: run python docs/notebook.py")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
