"""transformers' models that generate text, and one that it has only inside a model that also reads images."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

__all__ = ["causal_model"]


def causal_model(family: str) -> Any:
    """The class of a ``family``'s decoder with an output to the vocabulary."""
    name = f"{family.removesuffix('Text')}ForCausalLM"
    return _mistral_large4() if name == "MistralLarge4ForCausalLM" else getattr(transformers, name)


@cache
def _mistral_large4() -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.mistral_large4 import modeling_mistral_large4 as modeling

    class MistralLarge4ForCausalLM(modeling.MistralLarge4PreTrainedModel):
        config_class = modeling.MistralLarge4TextConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = modeling.MistralLarge4TextModel(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: torch.Tensor, cache: Any = None, use_cache: bool | None = None) -> Any:
            found, cap = self.model(input_ids, cache=cache, use_cache=use_cache), self.config.final_logit_softcapping
            logits = torch.tanh(self.lm_head(found.last_hidden_state) / cap) * cap
            return CausalLMOutputWithPast(logits=logits, past_key_values=found.cache)

    return MistralLarge4ForCausalLM
