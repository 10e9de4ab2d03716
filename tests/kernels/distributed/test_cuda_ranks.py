"""A model on two GPUs: NCCL between two processes, eager and in graphs. In float32, where rounding changes no token."""

from __future__ import annotations

import msgspec
import pytest
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from kernels.contract.expert_settings import ExchangeSettings
from kernels.contract.speculation import SpeculativeSettings
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.adapters import adapted_modules, end_modules, save_adapter
from tests.kits.speculation import latent_heads
from tests.kits.speculation.layouts import make_layout
from tests.kits.speculation.runner_drafts import PROMPTS

pytestmark = pytest.mark.long

NGRAM = {"algorithm": "NGRAM", "num_steps": 3, "num_draft_tokens": 4}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7}
EAGER = {"disable_graphs": True}


def job(model, texts, length, **more):
    return {"model": str(model.path), "prompts": texts, "length": length} | more


def cut(answer, length):
    return [tokens[:length] for tokens in answer["tokens"]]


def test_two_cuda_ranks_replay_graphs_with_their_collectives(cuda, reference, prompts):
    """Greedy tokens are transformers', sampled ones those of one GPU."""
    texts, graphs = prompts(5, 23, 40), cuda | {"graph_rows": [2, 4]}
    models = [reference(name) for name in ("parallel-llama", "parallel-qwen3", "placed-moe")]
    divided = [graphs, graphs, graphs | {"ep_size": 2}]
    jobs = [job(model, texts, 52, options=options) for model, options in zip(models, divided, strict=True)]
    sampled = job(models[1], texts, 52, options=graphs, sampling=SAMPLED)
    jobs += [sampled, jobs[0] | {"options": cuda | EAGER}, jobs[0] | {"speculation": NGRAM}]
    first, second = run_ranks(jobs)
    ((alone,),) = run_ranks([sampled], 1)
    assert [one["tokens"] for one in first] == [one["tokens"] for one in second]
    assert [one["graph_rows"] for one in first] == [*[[2, 4]] * 4, [], [2, 4]]
    assert all(one["replays"] for one in (*first[:4], first[5]))
    for answer, model in zip((*first[:3], *first[4:]), (*models, models[0], models[0]), strict=True):
        assert cut(answer, 52) == [model.greedy(text, 52) for text in texts]
    assert first[3]["tokens"] == alone["tokens"]


def test_two_cuda_stages_replay_graphs_between_their_messages(cuda, reference, prompts):
    """A dense model, of experts, and of latent attention; draft tokens are verified in graphs, too."""
    texts, graphs = prompts(5, 9), cuda | {"graph_rows": [1, 4]}
    models = [reference(name) for name in ("parallel-llama", "placed-moe", "parallel-deepseek-v3")]
    jobs = [job(model, texts, 40, options=graphs, stages=2) for model in models]
    jobs += [jobs[0] | {"speculation": NGRAM}, jobs[0] | {"options": cuda | EAGER}]
    for answers in run_ranks(jobs):
        for answer, model in zip(answers, (*models, models[0], models[0]), strict=True):
            assert cut(answer, 40) == [model.greedy(text, 40) for text in texts]
        assert [one["graph_rows"] for one in answers] == [*[[1, 4]] * 4, []]
        assert all(one["replays"] for one in answers[:4])
        assert any(count > 1 for counts in answers[3]["accepted"] for count in counts)


@pytest.mark.parametrize("stages", [1, 2])
def test_two_cuda_ranks_draft_what_one_gpu_drafts(stages, cuda, reference, prompts, tmp_path):
    """Trees of a draft model that reads results of several layers, and chains of the model itself."""
    graphs, plain = cuda | {"graph_rows": [1, 4]}, reference("parallel-qwen3").path
    _, algorithm, target, draft, _, _ = make_layout("eagle3", tmp_path)
    trees = SpeculativeSettings(algorithm, draft_model_path=str(draft), num_steps=3, topk=3, num_draft_tokens=6)
    chains = SpeculativeSettings("STANDALONE", draft_model_path=str(plain), num_steps=3)
    jobs = [
        {"model": str(path), "prompts": texts, "length": 50, "options": graphs}
        | {"speculation": msgspec.to_builtins(settings)}
        for path, settings, texts in ((target, trees, PROMPTS[:3]), (plain, chains, prompts(23, 9)))
    ]
    (alone,) = run_ranks(jobs, 1)
    for answers in run_ranks([one | {"stages": stages} for one in jobs]):
        assert [cut(answer, 50) for answer in answers] == [cut(one, 50) for one in alone]
        assert all(answer["replays"] for answer in answers)
        assert any(count > 2 for counts in answers[1]["accepted"] for count in counts)


def test_cuda_parts_of_attention_share_experts_without_graphs(cuda, reference, prompts):
    """One part runs a chunk, or has no rows, while the other decodes."""
    texts = prompts(5, 9, 17, 4)
    cases = [("placed-moe", [texts[:1], texts[1:]]), ("parallel-deepseek-v3", [[], texts[:1]])]
    options = cuda | {"dp_size": 2, "ep_size": 2, "graph_rows": [1, 2]}
    jobs = [
        {"model": str(reference(name).path), "parts": parts, "length": 26, "options": options} for name, parts in cases
    ]
    for rank, answers in enumerate(run_ranks(jobs)):
        assert [answer["graphs"] for answer in answers] == [[], []]
        for answer, (name, parts) in zip(answers, cases, strict=True):
            assert answer["tokens"] == [reference(name).greedy(text, 26) for text in parts[rank]]


def test_cuda_parts_of_attention_divide_the_experts_of_their_drafts(cuda, reference, prompts, tmp_path):
    """The target's experts move meanwhile."""
    latent, plain, texts = reference("parallel-deepseek-v3"), reference("placed-moe"), prompts(23, 9, 40)
    latent_heads.with_head(latent, DeepseekV3DecoderLayer, tmp_path / "heads")
    standalone = SpeculativeSettings("STANDALONE", draft_model_path=str(plain.path), num_steps=3)
    cases = [
        (latent, tmp_path / "heads", SpeculativeSettings("MTP", num_steps=3), "low_latency", [texts[:1], texts[1:]]),
        (plain, plain.path, standalone, "normal", [[], texts]),
    ]
    jobs = []
    for _, path, settings, mode, parts in cases:
        exchange = ExchangeSettings(mode)
        options = cuda | {"dp_size": 2, "ep_size": 2, "exchange": msgspec.to_builtins(exchange)}
        options["experts"] = {"rebalance": {"iterations": 2}}
        drafts = msgspec.to_builtins(msgspec.structs.replace(settings, exchange=exchange))
        jobs.append({"model": str(path), "parts": parts, "length": 60, "options": options, "speculation": drafts})
    for rank, answers in enumerate(run_ranks(jobs)):
        for answer, (model, _, _, _, parts) in zip(answers, cases, strict=True):
            assert cut(answer, 60) == [model.greedy(text, 60) for text in parts[rank]]
            assert answer["moved"]
    assert max(map(max, filter(None, answers[1]["accepted"]))) > 3  # the model drafts its own tokens


def test_two_cuda_ranks_divide_heads_as_large_as_those_of_real_models(cuda, reference, prompts):
    """Heads of 128, and latent vectors of 512 and 64 numbers. In bfloat16 two stages give the tokens of one GPU."""
    texts, graphs = prompts(5, 23), cuda | {"graph_rows": [1, 2]}
    dense, moe, latent = (
        reference(name) for name in ("parallel-wide-qwen3", "placed-wide-moe", "parallel-wide-deepseek-v3")
    )
    experts, apart = graphs | {"ep_size": 2}, graphs | {"ep_size": 2, "dp_size": 2}
    whole = [
        (dense, job(dense, texts, 40, options=graphs)),
        (dense, job(dense, texts, 40, options=graphs, stages=2)),
        (moe, job(moe, texts, 40, options=experts)),
        (latent, job(latent, texts, 40, options=experts)),
        (latent, job(latent, texts, 40, options=graphs, stages=2)),
    ]
    divided = [
        (model, {"model": str(model.path), "parts": [texts[:1], texts[1:]], "length": 40, "options": apart})
        for model in (moe, latent)
    ]
    rounded = job(dense, texts, 40, options=graphs | {"dtype": "bfloat16", "invariant": True})
    ((alone,),) = run_ranks([rounded], 1)
    for rank, answers in enumerate(run_ranks([*(each for _, each in whole + divided), rounded | {"stages": 2}])):
        for answer, (model, _) in zip(answers, whole, strict=False):
            assert cut(answer, 40) == [model.greedy(text, 40) for text in texts]
            assert answer["replays"]
        for answer, (model, _) in zip(answers[len(whole) :], divided, strict=False):
            assert answer["tokens"] == [model.greedy(texts[rank], 40)]
        assert answers[-1]["tokens"] == alone["tokens"]


def test_two_cuda_ranks_apply_adapters_as_one_gpu_does(cuda, reference, prompts, tmp_path):
    """Over each layer, over experts, and in stages. The second adapter is of DoRA; the third prompt has none."""
    texts, graphs, jobs = prompts(5, 23, 9), cuda | {"graph_rows": [1, 4]}, []
    dense, moe = reference("parallel-qwen3"), reference("placed-moe")
    for model in (dense, moe):
        some = adapted_modules(model.path)
        files = [save_adapter(tmp_path / f"{len(jobs)}-1", some | end_modules(model.path), 1)]
        files.append(
            save_adapter(tmp_path / f"{len(jobs)}-2", adapted_modules(model.path, (".experts.",)), 2, use_dora=True)
        )
        targets = ["all", "dora", "embed_tokens", "lm_head", "experts"]
        jobs.append(job(model, texts, 40, options=graphs, adapters=[str(file) for file in files], targets=targets))
    (alone,) = run_ranks(jobs, 1)
    divided = [jobs[0], jobs[1] | {"options": graphs | {"ep_size": 2}}, jobs[0] | {"stages": 2}]
    for answers in run_ranks(divided):
        assert [one["tokens"] for one in answers] == [one["tokens"] for one in (alone[0], alone[1], alone[0])]
    for model, answer in zip((dense, moe), alone, strict=True):
        adapted = [tokens != model.greedy(text, 40) for text, tokens in zip(texts, answer["tokens"], strict=True)]
        assert adapted == [True, True, False]
