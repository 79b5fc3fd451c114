"""The page answers, teaches and escapes; the terminal shows the same figures."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from mtp_train.advising.advice import advise
from mtp_train.advising.flags import Flags
from mtp_train.advising.options import find_options
from mtp_train.advising.page import markdown, options_table, print_advice

Make = Callable[..., Any]
NASTY = "<img src=x onerror=alert(1)> | `code`"


def test_page_and_terminal(acceptance: Make, report: Make, table: Make, workload: Make) -> None:
    from rich.console import Console

    asked = workload(temperature=0.5)
    data = report(
        acceptance(0.8), acceptance(0.7, temperature=1.0), acceptance(0.75, temperature=1.0, sampling="probabilistic"), heads=(NASTY,)
    )
    found = find_options({"run": data}, asked, table_of=lambda run, head: table(head))
    pasted = [Flags("vllm", "vllm serve tiny --x '{\"a\": 1}'", []), Flags("sglang", None, [f"Not run here {NASTY}"])]
    advice = advise(found, asked, target=NASTY, hardware="2 x core", flags=pasted)
    page = markdown(advice)
    for heading in (
        "Paste",
        "Whether to draft",
        "How long a draft",
        "A tree or a chain",
        "Temperature",
        "When to fall back",
        "What this rests on",
    ):
        assert f"## {heading}" in page, heading
    assert "```bash\nvllm serve tiny --x '{\"a\": 1}'\n```" in page
    assert "<img" not in page
    for block in page.split("\n\n"):
        widths = {line.replace("\\|", "").count("|") for line in block.split("\n") if line.startswith("|")}
        assert len(widths) <= 1, block
    assert "- greedy drafts: " in page and "- probabilistic drafts: " in page
    assert [row[-1] for row in options_table(advice).rows].count("recommended") == 1
    written = io.StringIO()
    print_advice(advice, Console(file=written, width=200))
    shown = written.getvalue()
    assert "vllm serve tiny" in shown and advice.answer.split(":")[0] in " ".join(shown.split())
    assert advice.recommended is not None
    assert f"{advice.recommended.speedup.value:.2f} [" in shown


def test_the_recommended_option_is_in_the_table_wherever_it_stands(ask: Make, acceptance: Make) -> None:
    """Faster ones that the engine does not serve may be many."""
    settings = {"nodes_per_depth": [1] * 14, "refresh": True}
    tree = acceptance(0.95, depth=14, scheme="tree", decoding="eagle_tree", num_nodes=14, notes={"decoding": settings})
    advice = ask(tree, acceptance(0.3, depth=1))
    assert advice.recommended is not None and advice.found.options.index(advice.recommended) >= 5
    rows = options_table(advice, most=5).rows
    assert len(rows) == 7 and rows[5][-1] == "recommended"
    assert "No tree was measured" not in markdown(advice), "a tree one node wide is one"
