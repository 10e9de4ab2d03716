"""What goes to the worker and back in a step: bytes by rows, whatever the sequences' length."""

import msgspec
import pytest

from actors.protocol import Step
from tests.actors.scheduling.stage import Stage, spec

PAGE = 4
FRAME = 114  # bytes of a message that are not its rows' or pages'


def decode_sizes(rows, prompt_length, steps=3 * PAGE):
    """Bytes of each step and of its answer, and the pages that it grants, once all prompts have run."""
    stage = Stage(
        pages=rows * (prompt_length // PAGE + steps + 2),
        page_size=PAGE,
        context_length=prompt_length + steps + 8,
        max_running=rows,
        max_slots=rows + 1,
        step_tokens=rows * prompt_length,
    )
    stage.submit(*(spec(row, [row + 1] * prompt_length, max_tokens=steps + 4) for row in range(rows)))
    stage.step()
    sizes = []
    for _ in range(steps):
        batch = stage.plan()
        assert len(batch.slots) == 4 * rows
        result = stage.finish()
        encoded = [len(msgspec.msgpack.encode(message)) for message in (Step(batch=batch, epoch=1), result)]
        sizes.append((*encoded, len(batch.page_ids) // 4))
    return sizes


def test_a_step_is_as_large_for_long_sequences_as_for_short_ones():
    assert decode_sizes(3, 160) == decode_sizes(3, 16)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_row_costs_three_numbers_out_and_two_back(rows):
    for sent, answered, pages in decode_sizes(rows, 8):
        assert sent <= FRAME + 12 * rows + 8 * pages
        assert answered <= FRAME + 8 * rows
