"""Table and page of a search."""

from typing import Any

from rayrec.tuning.report import render, table_text


def found(**changes: Any) -> dict[str, Any]:
    def trial(number: int, values: dict[str, Any], best: float | None, **others: Any) -> dict[str, Any]:
        curve = [] if best is None else [[10, best - 0.01], [20, best]]
        told = {"state": "finished", "error": None, "step": 20, "rows": 2000, "seconds": 3.4, "checkpoint": "c"}
        return {"number": number, "values": values, "best": best, "curve": curve, **told, **others}

    values = {"workload.model.dropout": 0.25, "batch_size": 512}
    failed = trial(2, {**values, "batch_size": 1024}, None, state="failed", error="InputError: <too> large")
    result = {"metric": "auroc", "best": {"number": 1, "values": values, "auroc": 0.75, "checkpoint": "c"}}
    result |= {"validation_rows": 1429, "test_rows": 1428, "trained_share": 0.1353}
    result["compared"] = {"auroc": {"difference": 0.012, "low": 0.002, "high": 0.022, "p_value": 0.0123}}
    return {**result, "trials": [trial(1, values, 0.75), trial(0, {}, 0.74), failed], **changes}


def test_table_has_one_line_per_trial() -> None:
    lines = table_text(found()).splitlines()
    assert lines[0].split() == ["trial", "dropout", "batch_size", "auroc", "step", "rows", "seconds", "state"]
    assert lines[1].split() == ["1", "0.25", "512", "0.75000", "20", "2,000", "3", "finished"]
    assert lines[2].split()[:4] == ["0", "recipe", "recipe", "0.74000"]
    assert lines[3].endswith("InputError: <too> large")
    assert "Trial 1 is best: auroc 0.75000 on 1,429 validation rows" in lines[4]
    assert "workload.model.dropout 0.25, batch_size 512" in lines[4]
    assert lines[5] == "Trained 13.5% of the rows of these trials, because weak trials were stopped early."
    assert "On 1,428 test rows, its AUROC differs by +0.01200 from" in lines[6]
    assert "(+0.00200 to +0.02200, p = 0.0123)" in lines[6]


def test_search_table_omits_unknown_values_and_page_shows_trials() -> None:
    text = table_text(found(best={"number": 0, "values": {}, "auroc": 0.74, "checkpoint": "c"}, compared=None, trained_share=1.0))
    assert "It has the settings of the recipe." in text
    assert "differs by" not in text
    assert "stopped early" not in text
    nothing = dict.fromkeys(("difference", "low", "high", "p_value"))
    assert "1,428 test rows are too few" in table_text(found(compared={"auroc": nothing}))
    page = render("first", found())
    words = ["Search first", "Validation auroc", "auroc by workload.model.dropout", "InputError: &lt;too&gt; large"]
    assert [text for text in words if text not in page] == []
    assert "<script" not in page
