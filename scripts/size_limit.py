"""No file over 400 lines, no function over 40. Prints what is too long; the exit code says whether anything was."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 40
SUFFIXES = frozenset({".py", ".lua", ".sh"})
ROOT = Path(__file__).parent.parent


def sources() -> list[Path]:
    """Every source file that git knows or would add."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [file for file in (ROOT / name for name in names) if file.suffix in SUFFIXES and file.is_file()]


def too_long(file: Path) -> Iterator[str]:
    """One line per offence in `file`. Tests are held to the length of files only: a scenario reads best whole."""
    text = file.read_text(encoding="utf-8")
    name = file.relative_to(ROOT)
    if (lines := len(text.splitlines())) > FILE_LINES:
        yield f"{name}: {lines} lines, {FILE_LINES} allowed"
    if file.suffix != ".py" or name.parts[0] == "tests":
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {lines} lines, {FUNCTION_LINES} allowed"


def main() -> int:
    offences = [offence for file in sources() for offence in too_long(file)]
    print(*offences, sep="\n", end="\n" if offences else "")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
