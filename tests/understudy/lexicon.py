"""The tokenizer of the understudy and the small JSON files of its model directory.

Byte-level BPE over pieces that are words, single digits, runs of marks and runs of blanks: single digits let a small
model see the places of a number. Any byte sequence of valid UTF-8 survives encoding and decoding unchanged.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from app.understudy import TEMPLATE
from tests.understudy.corpus import documents
from tests.understudy.lessons.conversation import END_OF_TEXT, MARKERS, SPECIAL_TOKENS, TURN_END, TURN_START

__all__ = ["CONFIG", "train_tokenizer", "write_model_files"]

PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
VOCABULARY = 4096
CONTEXT = 4096

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": CONTEXT,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}


def train_tokenizer(seed: int, count: int) -> Tokenizer:
    """A tokenizer of VOCABULARY tokens, trained on `count` documents of the corpus. Special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )

    def texts() -> Any:
        for segments in documents(seed, count):
            text = "".join(segment.text for segment in segments)
            for token in SPECIAL_TOKENS:
                text = text.replace(token, "\n")
            yield text

    tokenizer.train_from_iterator(texts(), trainer)
    # The markers of thoughts and tools are text to a client: they stay when special tokens are skipped.
    written = json.loads(tokenizer.to_str())
    for token in written["added_tokens"]:
        token["special"] = token["content"] not in MARKERS
    return Tokenizer.from_str(json.dumps(written))


def write_model_files(directory: Path, tokenizer: Tokenizer) -> None:
    """Write everything but the weights: config.json, tokenizer.json, tokenizer_config.json, generation_config.json."""
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    ends = [ids[TURN_END], ids[END_OF_TEXT]]
    added = {
        str(ids[token]): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token not in MARKERS,
        }
        for token in SPECIAL_TOKENS
    }
    files: dict[str, dict[str, Any]] = {
        "config.json": {
            **CONFIG,
            "bos_token_id": None,
            "eos_token_id": ids[TURN_END],
            "pad_token_id": ids[END_OF_TEXT],
        },
        "generation_config.json": {
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.95,
            "eos_token_id": ends,
            "pad_token_id": ids[END_OF_TEXT],
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "bos_token": None,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "unk_token": None,
            "additional_special_tokens": [TURN_START],
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": added,
            "chat_template": TEMPLATE.read_text(encoding="utf-8"),
        },
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
