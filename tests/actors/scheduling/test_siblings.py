import pytest

from actors.scheduling.in_flight_prefixes import InFlightPrefixes
from actors.scheduling.sequence import Sequence
from kernels.contract.step import SlotSampling
from tests.actors.scheduling.stage import spec


def sequence(number, prompt, **kwargs):
    return Sequence(spec(number, prompt, **kwargs), priority=0)


@pytest.mark.parametrize(
    ("shared", "prompt", "holds"),
    [
        (0, range(12), True),
        (0, [*range(4), 99], True),
        (1, [*range(4), 99], False),  # the page they have in common is there
        (0, [99, *range(1, 12)], False),
        (0, range(3), False),  # less than a page
        (0, range(4), False),  # its last token has to be computed anyhow
        (1, range(8), False),
        (1, range(9), True),
        (2, range(99), True),
        (3, range(99), False),
    ],
)
def test_which_sequence_waits_for_which(shared, prompt, holds):
    under_way = InFlightPrefixes(4)
    prefill = sequence(0, range(12))
    prefill.shared = shared
    under_way.add(prefill)
    assert under_way.computes_for(sequence(1, prompt)) is holds
    under_way.discard(prefill)
    under_way.discard(prefill)
    assert not under_way.computes_for(sequence(1, prompt))


@pytest.mark.parametrize(("tokens", "holds"), [(15, False), (16, False), (17, True), (40, True)])
def test_where_states_are_kept_a_sequence_waits_for_these_alone(tokens, holds):
    under_way = InFlightPrefixes(4, 4)
    under_way.add(sequence(0, range(40)))
    assert under_way.computes_for(sequence(1, range(tokens))) is holds


def test_a_scored_prompt_waits_for_none_and_a_tenant_for_its_own_only():
    under_way = InFlightPrefixes(4)
    under_way.add(sequence(0, range(12), salt=b"a"))
    assert under_way.computes_for(sequence(1, range(12), salt=b"a"))
    assert not under_way.computes_for(sequence(2, range(12), salt=b"b"))
    assert not under_way.computes_for(sequence(3, range(12), salt=b"a", sampling=SlotSampling(prompt_logprobs=0)))
