"""The API against its own description: requests made of /openapi.json, and answers held against it."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode

from tests.kits.target import ADMIN, Target

EXAMPLES = {GenerationMode.POSITIVE: 6, GenerationMode.NEGATIVE: 6}
LEFT_OUT = {"/drain", "/stage"}  # one would end the server for the tests that follow, the other never ends


@pytest.mark.long
def test_the_api_is_as_it_is_described(target: Target) -> None:
    load_all_checks()
    checks = CHECKS.get_by_names(
        [
            "not_a_server_error",
            "status_code_conformance",
            "content_type_conformance",
            "response_headers_conformance",
            "response_schema_conformance",
        ]
    )
    schema = schemathesis.openapi.from_url(f"{target.url}/openapi.json", headers=ADMIN)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 20
    tried: dict[str, set[int]] = {}
    for operation in operations:
        if operation.path in LEFT_OUT:
            continue
        for mode, examples in EXAMPLES.items():
            if mode is GenerationMode.NEGATIVE and operation.body.items == []:
                continue

            @hypothesis.settings(
                max_examples=examples if operation.body.items else 2,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
                phases=[hypothesis.Phase.generate],
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def play(case: Any) -> None:
                response = case.call(headers=ADMIN, timeout=60)
                tried.setdefault(case.operation.path, set()).add(response.status_code)
                case.validate_response(response, checks=checks)

            play()
    bodies = {operation.path for operation in operations if operation.body.items}
    assert all(400 in tried[path] for path in bodies)
    assert 200 in set().union(*(tried[path] for path in bodies))
    assert len(tried) == len({operation.path for operation in operations} - LEFT_OUT)
    target.assert_unharmed()
