"""Writes the list of metrics from their table into docs/telemetry.md."""

from pathlib import Path

from gateway.telemetry.metrics_table import FAMILIES, Family, Kind

PAGE = Path(__file__).parent.parent / "docs" / "telemetry.md"
BEGIN = "<!-- metrics: made by scripts/metrics_table.py -->\n"
END = "<!-- end of metrics -->\n"


def listed() -> str:
    """The table as Markdown."""
    lines = ["| metric | kind | labels | |", "|---|---|---|---|"]
    return "\n".join([*lines, *map(_line, FAMILIES), ""])


def _line(family: Family) -> str:
    name = family.name + ("_total" if family.kind is Kind.COUNTER else "")
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"| `{name}` | {family.kind.value} | {labels} | {family.help.replace('|', chr(92) + '|')} |"


def written(page: str) -> str:
    """The page with the list between its two marks. Raises ValueError where a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the marks {BEGIN.strip()} and {END.strip()} are not both there")
    return before + BEGIN + listed() + END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
