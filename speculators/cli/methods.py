"""`speculators methods`: what the registry holds."""

from __future__ import annotations

from speculators.cli.common import PROMPT_LOOKUP, JsonOption, check_json_path, write_json


def methods(json: JsonOption = None) -> None:
    """List the registered algorithms, and prompt lookup, which needs no training."""
    check_json_path(json)
    from rich.console import Console
    from rich.table import Table

    from speculators.registry import algorithms

    rows = [
        {"method": name, "trained": True, "vllm_method": algorithm.serving.method, "summary": algorithm.summary}
        for name, algorithm in algorithms().items()
    ]
    summary = "Copies what followed the last few tokens earlier in the text. No weights, no training."
    rows.append({"method": PROMPT_LOOKUP, "trained": False, "vllm_method": "ngram", "summary": summary})
    table = Table("method", "vLLM method", "summary")
    for row in rows:
        table.add_row(str(row["method"]), str(row["vllm_method"] or "-"), str(row["summary"]))
    Console().print(table)
    write_json(json, {"command": "methods", "methods": rows})
