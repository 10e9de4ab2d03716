"""Results that are the same, bit by bit, whatever else a step runs: of operators, and of models in random batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.contract.config import RunnerConfig
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.devices.invariant.capabilities import InvariantAttention, InvariantElementwise
from kernels.devices.invariant.elementwise import by_lines, pairwise_sum
from kernels.devices.invariant.matmul import TILE, TiledLinear
from kernels.devices.invariant.norm import InvariantNorm
from kernels.devices.select import select_device
from tests.kits.driver import VOCAB
from tests.kits.gguf_writer import write_gguf
from tests.kits.native import require_native

LENGTH = 150  # more than a block of keys
NEW = 20
"""Tokens of each answer."""
SAMPLED = SlotSampling(temperature=0.8, top_p=0.9, seed=5, logprobs=3)
GREEDY = SlotSampling(temperature=0.0, logprobs=3)


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rough(*shape, dtype=torch.float32):
    """Numbers whose sum depends on their order."""
    generator = torch.Generator().manual_seed(sum(shape))
    scale = torch.randint(-6, 7, shape, generator=generator).float().exp2()
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def alike(function, x):
    """``function`` gives any rows of ``x`` together the results of each row alone."""
    whole = function(x)
    for first, count in ((0, 1), (len(x) - 1, 1), (5, 3), (17, 16), (30, 200)):
        assert torch.equal(function(x[first : first + count]), whole[first : first + count])
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 80), (200, 1003), (1, 64), (2500, 700)])
def test_a_product_is_the_same_among_any_rows(outputs, inputs, dtype, threads):
    platform = select_device(RunnerConfig(model_path="", invariant=True, threads=threads))
    weight, bias, x = (rough(*shape, dtype=dtype) for shape in ((outputs, inputs), (outputs,), (300, inputs)))
    found = alike(platform.linear.make_dense(weight, bias), x)
    expected = x.double() @ weight.double().T + bias.double()
    assert (found - expected).abs().max() <= expected.abs().max() * (1e-6 if dtype == torch.float32 else 1e-2)
    assert platform.linear.make_dense(weight, bias)(x[:0]).shape == (0, outputs)


@pytest.mark.parametrize("unlike", [0, 3, TILE - 1])
def test_rows_that_a_library_treats_unlike_are_multiplied_alone(unlike):
    def multiply(x):
        found = x.sum(1, keepdim=True)
        if len(x) > 1:
            found[unlike] = x[unlike].flip(0).cumsum(0)[-1]
        return found

    linear = TiledLinear(multiply, 500, torch.empty(0))
    assert linear.tile == 1
    alike(linear, rough(300, 500))


@pytest.mark.parametrize("width", [8, 20, 1002, 20000])
def test_functions_and_sums_do_not_depend_on_place(width, threads):
    x = rough(300 if width < 9000 else 40, width)
    for function in (torch.exp_, torch.cos_, torch.sigmoid_):
        alike(lambda x, function=function: by_lines(function, x), x)
    found = alike(pairwise_sum, x)
    torch.testing.assert_close(found.double(), x.double().sum(-1), rtol=1e-4, atol=1e-3)
    alike(InvariantNorm(torch.rand(width), 1e-6), x)
    for dtype in (torch.float32, torch.bfloat16):
        alike(InvariantElementwise(torch.device("cpu")).silu_and_mul, x.to(dtype))
    for activation in ("silu", "gelu_tanh", "relu2"):
        elementwise = InvariantElementwise(torch.device("cpu"))
        alike(elementwise.activate(lambda x: x, activation), x)
        alike(elementwise.activate_and_mul(lambda x: x, activation), x)
    frequencies, angles = torch.rand(24), InvariantAttention(None, None, None).angles
    alike(
        lambda at: torch.cat(angles(at, frequencies, 1.0, torch.float32), -1),
        torch.arange(0, 300 * 97, 97),
    )


class Words:
    """Sequences of one model, and what each token is like where it runs alone: its log-probabilities' bytes."""

    def __init__(self, driver):
        self.driver, self.alone = driver, {}

    def expected(self, number):
        """The tokens of sequence ``number``, and the bytes for each one sampled."""
        if number not in self.alone:
            prompt = self.prompt(number)
            self.driver.admit(1, prompt, sampling=self.sampling(number))
            bits = [self.bits(self.driver.step([(1, self.driver.pending(1))])) for _ in range(12)]
            self.alone[number] = self.driver.tokens[1][len(prompt) :], [one for each in bits for one in each]
            self.driver.release(1)
        return self.alone[number]

    def prompt(self, number):
        generator = np.random.default_rng(number)
        return generator.integers(0, VOCAB, (3, 30, LENGTH)[number % 3]).tolist()

    def sampling(self, number):
        return GREEDY if number % 2 else SAMPLED

    @staticmethod
    def bits(result):
        """The results of each sampled token of a step."""
        assert not result.failed
        logprobs, tops = np.frombuffer(result.logprobs, np.float32), np.frombuffer(result.top_logprobs, np.float32)
        return [(one.tobytes(), each.tobytes()) for one, each in zip(logprobs, tops.reshape(-1, 3), strict=True)]


@pytest.fixture(scope="module")
def words(request, tmp_path_factory):
    made = {}

    def get(key, make):
        if key not in made:
            made[key] = Words(make())
        return made[key]

    return get


MODELS = {
    "llama": ("llama-biased", {"dtype": "float32"}),
    "bf16": ("qwen3", {"dtype": "bfloat16", "threads": 3}),
    "window": ("mistral", {"dtype": "bfloat16"}),
    "experts": ("qwen2-moe", {"dtype": "bfloat16"}),
    "head": ("qwen2", {"dtype": "bfloat16", "fp32_head": True}),
    "int8": ("qwen3", {"dtype": "bfloat16", "quantization": "int8"}),
    "kv-int8": ("qwen3", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    "kv-fp8": ("qwen3", {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}),
    "latent": ("deepseek-v3", {"dtype": "bfloat16", "threads": 3}),
    "latent-dense": ("minicpm3", {"dtype": "float32"}),
    "latent-int8": ("mistral4", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    "native": ("native-qwen3", {"dtype": "bfloat16", "threads": 3}),
    "native-window": ("native-mistral", {"dtype": "bfloat16"}),
    "native-experts": ("native-moe", {"dtype": "bfloat16"}),
    "native-latent": ("native-latent", {"dtype": "bfloat16", "threads": 3}),
    "native-int8": ("native-qwen3", {"dtype": "bfloat16", "quantization": "int8"}),
    "native-fp8": ("native-qwen3", {"dtype": "bfloat16", "quantization": "fp8"}),
    "native-experts-fp8": ("native-moe", {"dtype": "bfloat16", "quantization": "fp8"}),
    "native-kv-int8": ("native-qwen3", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    "native-kv-fp8": ("native-qwen3", {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}),
    "Q4_0": ("native-qwen3", {"dtype": "bfloat16"}),
    "Q4_1": ("native-qwen3", {"dtype": "bfloat16"}),
    "Q8_0": ("native-qwen3", {"dtype": "bfloat16"}),
}
"""The native ones are for levels with native operators; the last ones are GGUF files of these types."""


def model_of(name, reference, drive, tmp_path_factory, **more):
    native = name.startswith(("native", "Q"))
    if native:
        require_native()
    family, options = MODELS[name]
    path = reference(family).path
    if name.startswith("Q"):
        path = write_gguf(path, tmp_path_factory.mktemp("gguf") / "model.gguf", name)
    driver = drive(path, invariant=True, max_slots=8, **options | more)
    if native:  # decodes are a program, but where experts run in turn
        assert bool(driver.info.graph_rows) == (name != "native-experts-fp8")
        assert driver.info.cpu_operators in ("wheel", "compiled")
    return driver


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_token_is_the_same_in_any_batch(name, reference, drive, words, tmp_path_factory, data):
    """In steps of any rows, chunks of any sizes, behind shared pages, and after its sequence was begun again."""
    held = words(name, lambda: model_of(name, reference, drive, tmp_path_factory))
    driver = held.driver
    chosen = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True))
    expected = {number: held.expected(number) for number in chosen}
    slots, kept = {}, []
    try:
        for slot, number in enumerate(chosen, 1):
            tokens, _ = expected[number]
            prompt, sent = held.prompt(number), data.draw(st.integers(0, 5))
            shared = ()
            whole = (len(prompt) + sent - 1) // driver.info.page_size
            if whole and data.draw(st.booleans()):  # pages that another sequence has filled, in chunks
                driver.admit(7, prompt, tokens[:sent], held.sampling(number))
                while driver.pending(7):
                    count = min(driver.pending(7), data.draw(st.integers(1, 80)))
                    if count == driver.pending(7):
                        break
                    driver.step([(7, count)])
                whole = min(whole, driver.computed[7] // driver.info.page_size)
                filled = driver.release(7, keep_pages=True)
                shared = filled[:whole]
                driver.free.extend(filled[whole:])
                kept.extend(shared)
            driver.admit(slot, prompt, tokens[:sent], held.sampling(number), shared)
            slots[slot] = number, sent
        for _ in range(200):
            left = [slot for slot, (number, at) in slots.items() if at < len(expected[number][0])]
            if not left:
                break
            rows = []
            for slot in left:
                pending = driver.pending(slot)
                count = min(pending, data.draw(st.sampled_from([0, 1, 2, 17, 60, 300])))
                if count:
                    rows.append((slot, count))
            if not rows:
                continue
            reached = [
                slot for slot, count in sorted(rows, key=lambda row: row[1] != 1) if count == driver.pending(slot)
            ]
            result = driver.step(rows)
            for slot, found in zip(reached, held.bits(result), strict=True):
                number, at = slots[slot]
                tokens, bits = expected[number]
                assert driver.tokens[slot][-1] == tokens[at]
                assert found == bits[at], (number, at)
                slots[slot] = number, at + 1
    finally:
        for slot in slots:
            driver.release(slot)
        driver.free.extend(kept)
        driver.step([])


@pytest.mark.parametrize(
    "name", ["bf16", "latent", "native", "native-latent", "native-experts", "native-kv-int8", "Q4_0"]
)
def test_answers_are_the_same_with_draft_tokens_and_in_any_batch(name, reference, drive, tmp_path_factory, prompts):
    """Requests for tokens without scores, whose decodes are native calls where the level has them: alone, together with
    others that come and go, and with draft tokens."""
    texts = prompts(70, 3, 130, 20)
    hows = [SlotSampling(temperature=0.0), *(SlotSampling(temperature=0.8, top_p=0.9, seed=seed) for seed in (1, 2, 3))]
    together = SlotSampling(temperature=0.7, seed=5, logprobs=2)

    def answers(company, drafts):
        speculation = SpeculativeSettings("NGRAM", num_draft_tokens=5) if drafts else None
        driver = model_of(name, reference, drive, tmp_path_factory, speculation=speculation)
        found = []
        for text, how in () if company else zip(texts, hows, strict=True):
            driver.admit(1, text, sampling=how)
            driver.step([(1, len(text))])
            while len(driver.tokens[1]) < len(text) + NEW:
                driver.step([(1, 1)], {1: 4} if drafts else None)
            found.append(driver.tokens[1][len(text) : len(text) + NEW])
            driver.release(1)
        if not company:
            return found
        for slot, (text, how) in enumerate(zip(texts, hows, strict=True), 1):
            driver.admit(slot, text, sampling=how)
            driver.step([(slot, min(len(text), 40 * slot)), *((other, 1) for other in range(1, slot))])
            while driver.pending(slot) > 1:
                driver.step([(slot, min(driver.pending(slot), 33)), *((other, 1) for other in range(1, slot))])
        for turn in range(28):
            if turn == 10:  # whose log-probabilities keep the others from native calls
                driver.admit(6, texts[0], sampling=together)
                driver.step([(6, len(texts[0])), (1, 1), (3, 1)])
            if turn == 20:
                driver.release(6)
            rows = [(slot, 1) for slot in ((1, 2, 3, 4, 6) if 10 <= turn < 20 else (1, 2, 3, 4))]
            driver.step(rows, dict.fromkeys((slot for slot, _ in rows), 4) if drafts else None)
        return [driver.tokens[slot][len(text) : len(text) + NEW] for slot, text in enumerate(texts, 1)]

    alone = answers(False, False)
    assert answers(True, False) == alone
    assert answers(False, True) == alone
    assert answers(True, True) == alone
