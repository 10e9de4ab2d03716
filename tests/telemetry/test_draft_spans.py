"""What the trace of a step tells of its draft tokens."""

from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actors.protocol.requests import SamplingParams
from telemetry.traces.worker_spans import STEP_ROW, TracedRow, draft_spans, forward_spans
from tests.kits.engines import small_engine

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_step_is_divided_into_drafting_and_verifying() -> None:
    forwards = forward_spans((TracedRow(3, TRACE), TracedRow(STEP_ROW, TRACE)), 10.0, 11.0, step=4)
    draft, verify = draft_spans(forwards, 0.25, 0.5, 12, 7)
    whole = forwards[1]
    assert [draft.name, verify.name] == ["spec_draft", "spec_verify"]
    assert draft.parent == verify.parent == whole.parent
    assert draft.traceparent.split("-")[1] == TRACE.split("-")[1]
    assert draft.traceparent != verify.traceparent
    assert (draft.start, draft.end, verify.start, verify.end) == pytest.approx((10.0, 10.25, 10.5, 11.0))
    assert draft.attributes == {"drafted": 12}
    assert verify.attributes == {"accepted": 7}


def test_times_of_another_clock_stay_inside_the_step_and_rows_have_none() -> None:
    forwards = forward_spans((TracedRow(STEP_ROW, TRACE),), 10.0, 11.0)
    draft, verify = draft_spans(forwards, 9.0, 9.0, 1, 0)
    assert (draft.start, draft.end, verify.start, verify.end) == (10.0, 11.0, 10.0, 11.0)
    assert draft_spans(forward_spans((TracedRow(0, TRACE),), 10.0, 11.0), 0.1, 0.1, 1, 0) == ()


async def test_an_engine_traces_the_drafts_of_its_steps(tiny_model: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = small_engine(tiny_model, trace_level=2, tracer_provider=provider, speculative_algorithm="NGRAM")
    async with engine:
        async for _ in engine.generate([5, 6, 7] * 8, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)):
            pass
    spans = exporter.get_finished_spans()
    steps = {span.parent.span_id for span in spans if span.name == "forward" and span.parent is not None}
    for name, key in (("spec_draft", "troupe.drafted"), ("spec_verify", "troupe.accepted")):
        found = [span for span in spans if span.name == name]
        assert found
        assert all(span.parent is not None and span.parent.span_id in steps for span in found)
        assert all(key in (span.attributes or {}) for span in found)
