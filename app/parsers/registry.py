"""The formats by the names of ``--tool-call-parser`` and ``--reasoning-parser``, and the choice of ``auto``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from actors.options.serving import ThoughtFormat, ToolFormat
from app.parsers.base import StreamingParser
from app.parsers.harmony import ForcedHarmonyParser, HarmonyParser
from app.parsers.reasoning.formats import REASONING_FORMATS, ReasoningFormat
from app.parsers.tools.apertus import ApertusParser
from app.parsers.tools.cohere import CohereParser
from app.parsers.tools.deepseekv3 import DeepSeekV3Parser, DeepSeekV31Parser
from app.parsers.tools.deepseekv32 import DeepSeekV4Parser, DeepSeekV32Parser, GigaChat35Parser
from app.parsers.tools.dots import DotsParser
from app.parsers.tools.gemma4 import FunctionGemmaParser, Gemma4Parser
from app.parsers.tools.gigachat3 import GigaChat3Parser
from app.parsers.tools.glm45 import Glm45Parser
from app.parsers.tools.granite import Granite20bParser, GraniteParser
from app.parsers.tools.hermes import HermesParser
from app.parsers.tools.hy_v3 import HyV3Parser
from app.parsers.tools.inkling import InklingParser
from app.parsers.tools.internlm import InternLMParser
from app.parsers.tools.json_calls import JsonParser
from app.parsers.tools.k2_horizon import K2HorizonParser
from app.parsers.tools.kimi_k2 import KimiK2Parser
from app.parsers.tools.kimi_k3 import KimiK3Parser
from app.parsers.tools.llama3 import Llama3Parser
from app.parsers.tools.longcat import LongCatParser
from app.parsers.tools.minicpm5 import MiniCpm5Parser
from app.parsers.tools.minimax_m1 import HunyuanA13bParser, MiniMaxM1Parser
from app.parsers.tools.minimax_m2 import MiniMaxM2Parser
from app.parsers.tools.minimax_m3 import MiniMaxM3Parser
from app.parsers.tools.mistral import MistralParser
from app.parsers.tools.passthrough import PassthroughParser
from app.parsers.tools.phi4 import Phi4Parser
from app.parsers.tools.pythonic import Lfm2Parser, Llama4Parser, Olmo3Parser, PythonicParser
from app.parsers.tools.qwen3_coder import Qwen3CoderParser, SeedOssParser
from app.parsers.tools.solar_open2 import SolarOpen2Parser
from app.parsers.tools.step3 import Step3Parser

__all__ = ["AUTO", "OFF", "TOOL_PARSERS", "OutputFormat", "output_format"]

AUTO: Final = "auto"
OFF: Final = "off"
HARMONY: Final = "gpt-oss"

TOOL_PARSERS: Mapping[ToolFormat, type[StreamingParser]] = {
    "hermes": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "llama3_json": Llama3Parser,
    "llama4": Llama4Parser,
    "pythonic": PythonicParser,
    "mistral": MistralParser,
    "deepseekv3": DeepSeekV3Parser,
    "deepseekv31": DeepSeekV31Parser,
    "deepseekv32": DeepSeekV32Parser,
    "deepseek_v4": DeepSeekV4Parser,
    "kimi_k2": KimiK2Parser,
    "glm45": Glm45Parser,
    HARMONY: HarmonyParser,
    "minimax-m1": MiniMaxM1Parser,
    "minimax-m2": MiniMaxM2Parser,
    "step3": Step3Parser,
    "granite": GraniteParser,
    "internlm": InternLMParser,
    "phi4": Phi4Parser,
    "cohere": CohereParser,
    "gemma4": Gemma4Parser,
    "lfm2": Lfm2Parser,
    "functiongemma": FunctionGemmaParser,
    "minimax-m3": MiniMaxM3Parser,
    "hy_v3": HyV3Parser,
    "hunyuan_a13b": HunyuanA13bParser,
    "seed_oss": SeedOssParser,
    "longcat": LongCatParser,
    "olmo3": Olmo3Parser,
    "granite-20b-fc": Granite20bParser,
    "gigachat3": GigaChat3Parser,
    "gigachat35": GigaChat35Parser,
    "apertus": ApertusParser,
    "minicpm5": MiniCpm5Parser,
    "kimi_k3": KimiK3Parser,
    "solar_open2": SolarOpen2Parser,
    "dots": DotsParser,
    "k2_horizon": K2HorizonParser,
    "inkling": InklingParser,
    "json": JsonParser,
    "passthrough": PassthroughParser,
}

_TOOL_SIGNS: tuple[tuple[str, ToolFormat], ...] = (
    ("]<]minimax[>[", "minimax-m3"),
    ("<｜GCML｜", "gigachat35"),
    ("<｜DSML｜tool_calls>", "deepseek_v4"),
    ("<｜DSML｜", "deepseekv32"),
    ("<minimax:tool_call>", "minimax-m2"),
    ("<steptml:", "step3"),
    ("<|open|>", "kimi_k3"),
    ("<ifm|tool_call>", "k2_horizon"),
    ("<longcat_tool_call>", "longcat"),
    ("<|content_invoke_tool_json|>", "inkling"),
    ("<dots_function_call>", "dots"),
    ("<seed:tool_call>", "seed_oss"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_call:start|>", "solar_open2"),
    ("<|tools_prefix|>", "apertus"),
    ("<|role_sep|>", "gigachat3"),
    ("<|function_call_library|>", "granite-20b-fc"),
    ("<tool_sep", "hy_v3"),
    ("<arg_key:", "hy_v3"),
    ("<|tool_call_begin|>", "kimi_k2"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<｜tool▁sep｜>", "deepseekv31"),
    ("<|START_ACTION|>", "cohere"),
    ("<|action_start|>", "internlm"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<|tool_call>", "gemma4"),
    ("<|constrain|>", HARMONY),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "llama4"),
    ("<|python_tag|>", "llama3_json"),
    ("Environment: ipython", "llama3_json"),
    ("<|/tool_call|>", "phi4"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>[", "hunyuan_a13b"),
    ("<tool_calls>", "minimax-m1"),
    ("<function_calls>", "olmo3"),
    ("<function name=", "minicpm5"),
    ("<tool_call>", "hermes"),
)
"""Texts in a chat template and the format that they tell; the first that is there decides."""

_THOUGHT_SIGNS: tuple[tuple[str, ThoughtFormat], ...] = (
    ("◁think▷", "kimi"),
    ("[THINK]", "mistral"),
    ("<|START_THINKING|>", "cohere"),
    ("<|channel>", "gemma"),
    ("<mm:think>", "minimax-m3"),
    ("<|content_thinking|>", "inkling"),
    ("<seed:think>", "seed_oss"),
    ("<think:", "hy_v3"),
    ("<|open|>", "kimi_k3"),
    ("<ifm|think>", "k2_horizon"),
    ("<|think:start|>", "solar_open2"),
    ("<|inner_prefix|>", "apertus"),
    ("Here is my thought process:", "granite"),
    ("<|channel|>", HARMONY),
)

_THOUGHTS_BESIDE: Mapping[ToolFormat, ThoughtFormat] = {
    "qwen3_coder": "qwen3",
    "minimax-m2": "minimax",
    "kimi_k2": "kimi_k2",
    "step3": "step3",
    "glm45": "glm45",
    "hy_v3": "hy_v3",
    "hunyuan_a13b": "hunyuan_a13b",
}
"""Format of tool calls -> that of thoughts, for templates that show no more of these than ``</think>``."""

_FAMILIES: Mapping[str, tuple[ToolFormat, ThoughtFormat]] = {
    "GptOssForCausalLM": (HARMONY, HARMONY),
    "ApertusForCausalLM": ("apertus", "apertus"),
    "DeepseekV32ForCausalLM": ("deepseekv32", "deepseek-v3"),
    "DeepseekV4ForCausalLM": ("deepseek_v4", "deepseek-v3"),
    "Gemma4ForCausalLM": ("gemma4", "gemma"),
    "HYV4ForCausalLM": ("hy_v3", "hy_v3"),
    "HYV4VLForCausalLM": ("hy_v3", "hy_v3"),
    "Lfm2ForCausalLM": ("lfm2", OFF),
    "Lfm2MoeForCausalLM": ("lfm2", OFF),
    "Llama4ForCausalLM": ("llama4", OFF),
    "MiniMaxM1ForCausalLM": ("minimax-m1", "base"),
    "MiniMaxM3SparseForCausalLM": ("minimax-m3", "minimax-m3"),
    "Mistral3ForCausalLM": ("mistral", OFF),
    "Ministral3ForCausalLM": ("mistral", OFF),
    "Mistral4ForCausalLM": ("mistral", OFF),
    "MistralForCausalLM": ("mistral", OFF),
    "MistralLarge4ForCausalLM": ("mistral", OFF),
    "MixtralForCausalLM": ("mistral", OFF),
    "SeedOssForCausalLM": ("seed_oss", "seed_oss"),
}
"""``architectures`` of config.json -> formats of tool calls and thoughts, for templates that show neither."""


class OutputFormat(msgspec.Struct, frozen=True):
    """How a model writes: the parser of its tool calls, and its thoughts. None: these stay text."""

    tools: type[StreamingParser] | None
    reasoning_format: ReasoningFormat | None
    harmony: bool = False

    def parser(self, with_tools: bool) -> type[StreamingParser] | None:
        """The class that reads an answer; None where all of it is content."""
        if self.harmony:
            return HarmonyParser
        if with_tools and self.tools is not None:
            return self.tools
        return StreamingParser if self.reasoning_format is not None else None

    def json_parser(self) -> type[StreamingParser]:
        """The class that reads an answer that a grammar makes calls as JSON."""
        return ForcedHarmonyParser if self.harmony else JsonParser

    def special_tokens(self, with_tools: bool) -> tuple[str, ...]:
        """Special tokens that must not be dropped from the text before it is read."""
        parser = self.parser(with_tools)
        marks = () if parser is None else (*parser.OPEN, *parser.MARKS, *parser.TOKENS)
        return (
            *marks,
            *(self.reasoning_format.shown if self.reasoning_format is not None and not self.harmony else ()),
        )


def output_format(
    tools: ToolFormat | None, thoughts: ThoughtFormat | None, template: str | None, architecture: str
) -> OutputFormat:
    """The formats of these names; None and ``auto`` ask the chat template, then the model's family."""
    family = _FAMILIES.get(architecture.replace("ForConditionalGeneration", "ForCausalLM"), ("hermes", OFF))
    if tools is None or tools == AUTO:
        tools = _tools_of(template or "") or family[0]
    if thoughts is None or thoughts == AUTO:
        thoughts = _thoughts_of(template or "", tools) or family[1]
    harmony = HARMONY in (tools, thoughts)
    reasoning = None if thoughts == OFF else REASONING_FORMATS["base" if thoughts == HARMONY else thoughts]
    return OutputFormat(
        tools=None if tools == OFF else TOOL_PARSERS[tools],
        reasoning_format=None if reasoning is None else reasoning.spelled(template or ""),
        harmony=harmony,
    )


def _tools_of(template: str) -> ToolFormat | None:
    name = next((name for sign, name in _TOOL_SIGNS if sign in template), None)
    if name == "deepseekv31" and "```json" in template:
        return "deepseekv3"
    return name


def _thoughts_of(template: str, tools: ToolFormat) -> ThoughtFormat | None:
    name = next((name for sign, name in _THOUGHT_SIGNS if sign in template), None)
    if name is None and "</think>" in template:
        return _THOUGHTS_BESIDE.get(tools, "ernie45" if "<response>" in template else "base")
    return name
