"""What the bench says of a GPU's idle time between decodes."""

from tests.bench._device_profile import _idle


def test_the_time_between_decodes_is_distinguished_from_that_within() -> None:
    spans = [(0.0, 10.0, "prefill_attention_kernel"), (10.0, 20.0, "step_end_kernel")]
    for begin in (25.0, 125.0):  # 5 us without a kernel before each, a copy among them, and 3 within
        spans += [(begin - 2.0, begin - 1.0, "Memcpy HtoD (Pinned -> Device)")]
        spans += [(begin, begin + 50.0, "gemv_kernel"), (begin + 53.0, begin + 95.0, "step_end_kernel")]
    assert _idle(spans) == "; 2 decodes: idle 8.0 % of the time, 5.00 % between them"


def test_nothing_is_reported_for_a_single_decode() -> None:
    assert (
        _idle([(0.0, 10.0, "prefill_attention_kernel"), (11.0, 12.0, "gemv_kernel"), (12.0, 13.0, "step_end_kernel")])
        == ""
    )
