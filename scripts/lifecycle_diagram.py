"""Draws the life cycle of a request from its table into docs/architecture.md; --check says whether it is current."""

import sys
from pathlib import Path

from policies.lifecycle import NEXT, TERMINAL, State

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
BEGIN = "<!-- life cycle: made by scripts/lifecycle_diagram.py -->\n"
END = "<!-- end of life cycle -->\n"


def diagram() -> str:
    """The table as a Mermaid state diagram. Events that lead the same way share an arrow."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {State.RECEIVED.name}"]
    for state, edges in NEXT.items():
        ways: dict[State, list[str]] = {}
        for event, target in edges.items():
            ways.setdefault(target, []).append(event.value)
        lines += [f"    {state.name} --> {target.name}: {', '.join(events)}" for target, events in ways.items()]
    lines += [f"    {state.name} --> [*]" for state in NEXT if state in TERMINAL]
    return "\n".join([*lines, "```", ""])


def drawn(page: str) -> str:
    """The page with the diagram between its two marks. Raises ValueError where a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the marks {BEGIN.strip()} and {END.strip()} are not both there")
    return before + BEGIN + diagram() + END + after


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    new = drawn(page)
    if "--check" in arguments:
        return 0 if new == page else 1
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
