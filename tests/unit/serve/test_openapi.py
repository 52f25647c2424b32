"""OpenAPI document and counters."""

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import schemathesis
from builders.click_models import ANY, make_app, make_model, make_preprocessor
from builders.requests import sample_values
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rayrec.schema import Schema
from rayrec.serve.counters import Counters

TOKEN = "open sesame"
FEW = Schema(tokens="hexadecimal", label="label", dense=("int_0", "int_1"), sparse=("cat_0", "cat_1"))
"""Of the kind of Criteo's, with fewer columns, which a fuzzer tries more of."""
REFUSALS = schemathesis.Config.from_dict(
    {"checks": {"negative_data_rejection": {"expected-statuses": [400, 401, 413, 415, 422]}}}
)
"""Too many rows are 413, which is none of the fuzzer's own."""
RELAXED = settings(
    max_examples=100, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
TEXTS = ("text/tab-separated-values", "text/csv")


@schemathesis.serializer(*TEXTS)
def _as_text(context: Any, value: Any) -> bytes | Any:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


@pytest.mark.parametrize(("schema", "with_token"), [(FEW, False), (ANY, True)], ids=["hexadecimal", "any"])
def test_fuzzer_passes(schema: Schema, with_token: bool) -> None:
    line = st.tuples(*[st.sampled_from(["", "3", "-7", "7e0ccccf"])] * len(schema.columns)).map("\t".join)
    for media_type in TEXTS:
        schemathesis.openapi.media_type(media_type, line)
    digest = hashlib.sha256(TOKEN.encode()).digest() if with_token else None
    app = make_app(make_model(make_preprocessor(schema)), token_digest=digest, max_rows=5, allowed_hosts=("testserver",))
    headers = {"authorization": f"Bearer {TOKEN}"} if with_token else {}
    fuzzed = schemathesis.openapi.from_asgi("/openapi.json", app, config=REFUSALS, headers=headers)
    seen: set[tuple[str, int]] = set()

    def check(case: schemathesis.Case) -> None:
        response = case.call(headers=headers)
        # Lines of text have a grammar that a JSON schema does not tell; there only the answer is looked at.
        left_out = [schemathesis.checks.CHECKS.get_one("positive_data_acceptance")] if case.media_type in TEXTS else []
        case.validate_response(response, headers=headers, excluded_checks=left_out)
        seen.add((case.path, response.status_code))

    for result in fuzzed.get_all_operations():
        operation = result.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            if mode.is_positive or operation.body:  # nothing of the others can be wrong
                RELAXED(given(operation.as_strategy(generation_mode=mode))(check))()
    assert {status for path, status in seen if path == "/v1/score"} >= {200, 400}


def test_nan_difference_is_counted_but_not_summed() -> None:
    counters, name = Counters(), "rayrec_serve_shadow_score_difference"
    counters.shadow_score_difference.observe(np.array([[0.25, math.nan], [1e-6, 0.0]]))
    values = sample_values(counters.snapshot())
    assert [values[f"{name}_bucket", (("le", bound),)] for bound in ("1e-06", "0.1", "+Inf")] == [2, 2, 4]
    assert (values[f"{name}_count", ()], values[f"{name}_sum", ()]) == (4, 0.250001)
