import pytest

from actors.scheduling.growth import GrowthReserve
from actors.scheduling.sequence import Sequence
from tests.actors.scheduling.stage import spec


def running(prompt, left):
    """A sequence with ``prompt`` tokens, all of them in pages of four, and ``left`` to be sampled."""
    sequence = Sequence(spec(0, range(prompt)), priority=0)
    sequence.target = sequence.known + left
    sequence.pages = -(-prompt // 4)
    return sequence


@pytest.mark.parametrize(("conservativeness", "pages"), [(0.0, 0), (1.0, 18), (2.0, 25), (9.0, 25)])
def test_the_share_of_the_output_to_come(conservativeness, pages):
    assert GrowthReserve(conservativeness).pages([running(8, 100)], 4) == pages


def test_the_rest_of_a_prefill_counts_in_full():
    prefill = running(40, 0)
    prefill.pages = 3
    assert GrowthReserve(1.0).pages([prefill], 4) == 7


def test_the_share_falls_with_good_steps_and_rises_with_a_preemption():
    reserve = GrowthReserve(1.0)
    for _ in range(300):
        reserve.step()
    assert reserve.pages([running(8, 100)], 4) == 10
    for _ in range(900):
        reserve.step()
    assert reserve.pages([running(8, 100)], 4) == 3
    reserve.preempted()
    assert reserve.pages([running(8, 100)], 4) == 18


def test_an_output_is_looked_ahead_to_a_horizon():
    assert GrowthReserve(2.0).pages([running(8, 100_000)], 4) == 1024
