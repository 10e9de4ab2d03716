"""Models that embed, classify or reward give the numbers of transformers, by the formulas of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.tasks import Classify, Embed, NextToken
from kernels.models.pooling import read_pooling
from kernels.models.registry import BUILT_IN, find_encoder
from tests.kits.driver import COMMON
from tests.kits.vectors import inputs, run

SMALL = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}


def make(directory: Path, name: str, config: str, **options):
    """A model of seeded weights, saved as transformers does."""
    torch.manual_seed(sum(name.encode()))
    model = getattr(transformers, name)(getattr(transformers, config)(**options)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    model.save_pretrained(directory)
    return model


def pool(directory, mode, normalize=True):
    """What sentence-transformers saves."""
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    listed = [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, mode: True}))


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other.numpy(), atol=2e-5, rtol=2e-4)


ENCODER = {
    "Bert": SMALL | {"vocab_size": 211, "max_position_embeddings": 64, "type_vocab_size": 2, "pad_token_id": 0},
    "Roberta": SMALL | {"vocab_size": 211, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1},
    "XLMRoberta": SMALL | {"vocab_size": 211, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1},
}


@pytest.mark.parametrize("family", sorted(ENCODER))
@pytest.mark.parametrize(
    ("mode", "normalize"),
    [
        ("", True),
        ("pooling_mode_cls_token", False),
        ("pooling_mode_mean_tokens", True),
        ("pooling_mode_lasttoken", True),
    ],
)
@torch.inference_mode()
def test_an_encoder_embeds_as_transformers_does(tmp_path, family, mode, normalize):
    model = make(tmp_path, f"{family}Model", f"{family}Config", **ENCODER[family])
    if mode:
        pool(tmp_path, mode, normalize)
    prompts = inputs()
    info, found = run(tmp_path, prompts, Embed(normalize), chunk=20)
    assert (info.tasks, info.context_length, info.pooling.normalize) == (("embed",), 64, normalize)
    states = [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    pooled = [state.mean(0) if "mean" in mode else state[-1] if "last" in mode else state[0] for state in states]
    close(found, [torch.nn.functional.normalize(one, dim=0) if normalize else one for one in pooled])


@pytest.mark.parametrize("family", sorted(ENCODER))
@torch.inference_mode()
def test_an_encoder_that_was_trained_to_fill_gaps_embeds(tmp_path, family):
    """As the checkpoints of some models of sentence-transformers say."""
    model = make(tmp_path, f"{family}ForMaskedLM", f"{family}Config", **ENCODER[family])
    pool(tmp_path, "pooling_mode_mean_tokens")
    prompts = inputs()
    _, found = run(tmp_path, prompts, Embed())
    states = [model.base_model(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in prompts]
    close(found, [torch.nn.functional.normalize(state, dim=0) for state in states])


@torch.inference_mode()
def test_an_encoder_that_counts_from_zero_needs_no_padding_token(tmp_path):
    make(tmp_path, "BertModel", "BertConfig", **ENCODER["Bert"])
    _, expected = run(tmp_path, inputs(), Embed())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    _, found = run(tmp_path, inputs(), Embed())
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta"])
def test_the_most_tokens_are_those_of_the_transformer_module(tmp_path, name):
    (tmp_path / f"sentence_{name}_config.json").write_text('{"max_seq_length": 33, "do_lower_case": true}')
    found = read_pooling(tmp_path, {"architectures": ["BertModel"]})
    assert (found.max_tokens, found.lowercase) == (33, True)


@pytest.mark.parametrize("family", sorted(ENCODER))
@pytest.mark.parametrize("labels", [1, 3])
@torch.inference_mode()
def test_an_encoder_classifies_as_transformers_does(tmp_path, family, labels):
    options = ENCODER[family] | {"num_labels": labels}
    model = make(tmp_path, f"{family}ForSequenceClassification", f"{family}Config", **options)
    prompts, second = inputs(), 3 if family == "Bert" else 0
    tasks = [Classify(activate=index % 2 == 0, second=second) for index in range(len(prompts))]
    info, found = run(tmp_path, prompts, tasks)
    assert (info.tasks, len(info.pooling.labels)) == (("classify",), labels)
    expected = []
    for index, ids in enumerate(prompts):
        types = torch.tensor([[int(second and place >= second) for place in range(len(ids))]])
        logits = model(torch.tensor([ids]), token_type_ids=types).logits[0]
        activate = (lambda x: x.softmax(-1)) if labels > 1 else torch.sigmoid
        expected.append(activate(logits) if index % 2 == 0 else logits)
    close(found, expected)


DECODERS = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": None},
    "Gemma2": {"head_dim": 16, "sliding_window": 21, "query_pre_attn_scalar": 16, "pad_token_id": 0},
}


@pytest.mark.parametrize("family", sorted(DECODERS))
@torch.inference_mode()
def test_a_decoder_rewards_as_transformers_does(tmp_path, family):
    options = COMMON | DECODERS[family] | {"num_labels": 1, "pad_token_id": 0}
    model = make(tmp_path, f"{family}ForSequenceClassification", f"{family}Config", **options)
    prompts = inputs()
    info, found = run(tmp_path, prompts, Classify(activate=False), chunk=20)
    assert info.tasks == ("classify",)
    close(found, [model(torch.tensor([ids])).logits[0] for ids in prompts])
    _, found = run(tmp_path, prompts[:2], Classify())
    close(found, [model(torch.tensor([ids])).logits[0].sigmoid() for ids in prompts[:2]])


@pytest.mark.parametrize("prefixed", [True, False])
@torch.inference_mode()
def test_a_decoder_embeds_its_last_token(tmp_path, prefixed):
    """Also a checkpoint without the prefix of the decoder and without an output, as Qwen3-Embedding is saved."""
    model = make(tmp_path, "Qwen3ForCausalLM", "Qwen3Config", **COMMON, head_dim=16, tie_word_embeddings=False)
    if not prefixed:
        file = tmp_path / "model.safetensors"
        kept = {name.removeprefix("model."): one for name, one in load_file(file).items() if "lm_head" not in name}
        save_file(kept, file, metadata={"format": "pt"})
        pool(tmp_path, "pooling_mode_lasttoken")
    prompts = inputs()
    info, found = run(tmp_path, prompts, Embed(), chunk=20, is_embedding=prefixed)
    assert info.tasks == ("embed",)
    states = [model.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in prompts]
    close(found, [torch.nn.functional.normalize(state, dim=0) for state in states])


def add_dense(directory: Path, sizes: list[int], activations: list[str], bias: bool = True) -> list[torch.nn.Linear]:
    """Dense modules behind the pooling, as sentence-transformers saves them."""
    modules = json.loads((directory / "modules.json").read_text())
    layers = []
    for index, activation in enumerate(activations):
        layer = torch.nn.Linear(sizes[index], sizes[index + 1], bias=bias)
        path = f"{index + 2}_Dense"
        modules.insert(index + 2, {"idx": 0, "path": path, "type": "sentence_transformers.models.Dense"})
        (directory / path).mkdir()
        config = {
            "in_features": sizes[index],
            "out_features": sizes[index + 1],
            "bias": bias,
            "activation_function": f"torch.nn.modules.{activation}",
        }
        (directory / path / "config.json").write_text(json.dumps(config))
        weights = {f"linear.{name}": one.detach() for name, one in layer.named_parameters()}
        save_file(weights, directory / path / "model.safetensors", metadata={"format": "pt"})
        layers.append(layer)
    (directory / "modules.json").write_text(json.dumps(modules))
    return layers


@pytest.mark.parametrize("decoder", [False, True])
@torch.inference_mode()
def test_vectors_pass_dense_modules(tmp_path, decoder):
    if decoder:
        model = make(tmp_path, "Qwen3Model", "Qwen3Config", **COMMON, head_dim=16)
        pool(tmp_path, "pooling_mode_lasttoken")
    else:
        model = make(tmp_path, "BertModel", "BertConfig", **ENCODER["Bert"])
        pool(tmp_path, "pooling_mode_mean_tokens", normalize=False)
    activations = ["activation.Tanh", "activation.GELU", "linear.Identity"]
    layers = add_dense(tmp_path, [48, 80, 20, 24], activations, bias=not decoder)
    prompts = inputs()
    info, found = run(tmp_path, prompts, Embed(normalize=decoder), chunk=20)
    assert info.pooling is not None
    assert [layer.activation for layer in info.pooling.dense] == ["tanh", "gelu", "none"]
    expected = []
    for ids in prompts:
        states = model(torch.tensor([ids])).last_hidden_state[0]
        vector = states[-1] if decoder else states.mean(0)
        vector = layers[2](torch.nn.functional.gelu(layers[1](layers[0](vector).tanh())))
        expected.append(torch.nn.functional.normalize(vector, dim=0) if decoder else vector)
    close(found, expected)


@torch.inference_mode()
def test_dense_modules_with_other_weights_are_refused(tmp_path):
    make(tmp_path, "BertModel", "BertConfig", **ENCODER["Bert"])
    pool(tmp_path, "pooling_mode_mean_tokens")
    add_dense(tmp_path, [48, 20], ["activation.Tanh"])
    weight, bias = torch.zeros(20, 48), torch.zeros(20)
    for weights in (
        {"linear.weight": torch.zeros(20, 47), "linear.bias": bias},
        {"linear.weight": weight},
        {"linear.weight": weight, "linear.bias": bias, "more": torch.zeros(1)},
    ):
        save_file(weights, tmp_path / "2_Dense" / "model.safetensors")
        with pytest.raises(LoadError, match="2_Dense holds the tensors"):
            run(tmp_path, inputs(), Embed())
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="2_Dense"):
        run(tmp_path, inputs(), Embed())
    _, found = run(tmp_path, inputs(), Embed(), load_format="dummy")
    assert [len(vector) for vector in found] == [20] * len(inputs())


BOTH_WAYS = {
    "Gemma3TextModel": ("Gemma3TextConfig", {"use_bidirectional_attention": True, "sliding_window": 16, "head_dim": 16,
        "query_pre_attn_scalar": 24, "num_hidden_layers": 7}),
    "LlamaModel": ("LlamaConfig", {"is_causal": False}),
    "MistralModel": ("MistralConfig", {"is_causal": False, "sliding_window": 9}),
    "Qwen2Model": ("Qwen2Config", {"is_causal": False}),
    "Qwen3ForCausalLM": ("Qwen3Config", {"is_causal": False, "head_dim": 16}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BOTH_WAYS))
@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
@torch.inference_mode()
def test_decoders_embed_with_attention_in_both_directions(tmp_path, name, mode):
    config, options = BOTH_WAYS[name]
    make(tmp_path, name, config, **COMMON | options)
    whole = getattr(transformers, name).from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = whole.model if name.endswith("LM") else whole
    pool(tmp_path, f"pooling_mode_{'mean_tokens' if mode == 'mean' else mode}")
    prompts = inputs()
    info, found = run(tmp_path, prompts, Embed(), chunk=20)
    assert info.pooling is not None
    assert info.pooling.encoder
    states = [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    vectors = [state.mean(0) if mode == "mean" else state[-1] for state in states]
    close(found, [torch.nn.functional.normalize(vector, dim=0) for vector in vectors])


@torch.inference_mode()
def test_a_generating_decoder_says_what_comes_next(tmp_path):
    """As Qwen3-Reranker's yes and no."""
    model = make(tmp_path, "Qwen3ForCausalLM", "Qwen3Config", **COMMON, head_dim=16)
    prompts = inputs()
    info, found = run(
        tmp_path, prompts, [NextToken((5, 9)), Embed(), NextToken((7,)), Embed(False), NextToken((1, 2, 3))]
    )
    assert info.pooling is None
    logprobs = [model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in prompts]
    close([found[0], found[2], found[4]], [logprobs[0][[5, 9]], logprobs[2][[7]], logprobs[4][[1, 2, 3]]])
    assert [len(vector) for vector in found] == [2, 48, 1, 48, 3]


@torch.inference_mode()
def test_a_reward_model_of_two_layers_is_run(tmp_path):
    """Qwen2.5-Math-RM's head, which transformers has not."""
    model = make(tmp_path, "Qwen2ForCausalLM", "Qwen2Config", **COMMON, tie_word_embeddings=True)
    generator = torch.Generator().manual_seed(1)
    head = {
        "score.0.weight": torch.randn(48, 48, generator=generator) / 7,
        "score.0.bias": torch.randn(48, generator=generator),
        "score.2.weight": torch.randn(1, 48, generator=generator),
        "score.2.bias": torch.randn(1, generator=generator),
    }
    file, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    save_file(load_file(file) | head, file, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2ForRewardModel"]}))
    prompts = inputs()
    _, found = run(tmp_path, prompts, Classify())
    states = [model.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in prompts]
    inner = [(head["score.0.weight"] @ state + head["score.0.bias"]).relu() for state in states]
    close(found, [head["score.2.weight"] @ one + head["score.2.bias"] for one in inner])


def test_quantized_encoders_are_close(tmp_path):
    make(tmp_path, "BertModel", "BertConfig", **ENCODER["Bert"])
    prompts = inputs()
    _, exact = run(tmp_path, prompts, Embed())
    _, rounded = run(tmp_path, prompts, Embed(), quantization="int8")
    assert all(float(one @ other) > 0.99 for one, other in zip(exact, rounded, strict=True))
    assert any((one != other).any() for one, other in zip(exact, rounded, strict=True))


def test_encoders_are_those_of_the_registry():
    encoders = {entry.architecture for entry in BUILT_IN if entry.encoder}
    modules = ("kernels.models.bert", "kernels.models.clip", "kernels.models.modernbert")
    assert encoders == {entry.architecture for entry in BUILT_IN if entry.module in modules}
    assert all(find_encoder(name) is not None for name in encoders)
    assert find_encoder("LlamaForCausalLM") is None


@pytest.mark.parametrize(
    ("files", "config", "reason"),
    [
        ({"modules.json": [{"type": "x.LSTM", "path": "2_LSTM"}]}, {}, "module LSTM, which is not run"),
        ({"modules.json": [{"type": "x.Normalize"}, {"type": "x.Dense", "path": "2"}]}, {}, "run in the order"),
        ({"modules.json": [{"type": "x.Dense", "path": "2"}]}, {}, "in_features must be"),
        ({"modules.json": [{"type": "x.Dense", "path": "2"}], "2/config.json": {"in_features": 4, "out_features": 4}},
         {"hidden_size": 8}, "in_features is 4"),
        ({"modules.json": [{"type": "x.Dense", "path": "2"}], "2/config.json": {"in_features": 4, "out_features": 4,
          "activation_function": "os.system.Tanh"}}, {}, "activation_function 'os.system.Tanh' is not run"),
        ({"modules.json": [{"type": "x.Dense", "path": "2"}], "2/config.json": {"in_features": 4, "out_features": 4,
          "module_input_name": "token_embeddings"}}, {}, "module_input_name 'token_embeddings' is not run"),
        ({"modules.json": [{"type": "x.Pooling", "path": "../1"}]}, {}, "a directory outside its own"),
        ({"modules.json": [{"type": "x.Pooling", "path": ".."}]}, {}, "a directory outside its own"),
        ({"config_sentence_transformers.json": {"default_prompt_name": "query"}}, {}, "'query' is none of prompts"),
        ({"config_sentence_transformers.json": {"prompts": ["query"]}}, {}, "prompts must be an object"),
        ({"config_sentence_transformers.json": {"prompts": {"query": "q: "}},
          "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "include_prompt": False}}, {}, "include_prompt"),
        ({"modules.json": {"type": 1}}, {}, "must be a list of modules"),
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, {}, "pooling_mode_max_tokens is not run"),
        ({"1_Pooling/config.json": {"pooling_mode_mean_tokens": True}}, {"architectures": ["Qwen3Model"]}, "last t"),
        ({}, {"architectures": ["GlmModel"], "is_causal": False}, "is_causal"),
        ({}, {"architectures": ["Qwen2ForCausalLM"], "is_causal": False}, "serve it with --is-embedding"),
        ({}, {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "serve it with --is-embed"),
        ({}, {"architectures": ["Qwen2ForSequenceClassification"], "is_causal": False}, "is run for embeddings of"),
        ({}, {"architectures": ["BertModel"], "max_position_embeddings": "x"}, "max_position_embeddings"),
        ({}, {"architectures": ["BertForSequenceClassification"], "num_labels": 0}, "num_labels must be"),
        ({}, {"architectures": ["BertForSequenceClassification"],
              "sentence_transformers": {"activation_fn": "os.system"}}, "os.system"),
    ],
)  # fmt: skip
def test_what_is_not_run_is_refused(tmp_path, files, config, reason):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=reason):
        read_pooling(tmp_path, {"architectures": ["BertModel"]} | config)
