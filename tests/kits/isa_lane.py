"""The lane of tests that run once more on each smaller instruction set: ``pytest -m isa``."""

from __future__ import annotations

__all__ = ["ISA"]

ISA = (
    "actors/engine/test_engine.py",
    "actors/engine/test_engine_cpu_isa.py",
    "kernels/devices/cpu",
    "kernels/devices/test_experts.py",
    "kernels/devices/test_invariant.py",
    "kernels/devices/test_platform.py",
    "kernels/distributed/test_stage_programs.py",
    "kernels/execution/test_executors.py",
    "kernels/execution/test_prepared_steps.py",
    "kernels/execution/test_rebalancing.py",
    "kernels/execution/test_runner.py",
    "kernels/grammar/test_grammar_slots.py",
    "kernels/models/test_equality.py",
    "kernels/models/test_gpt_oss.py",
    "kernels/models/test_layer_context.py",
    "kernels/sampling",
    "kernels/speculation/test_grammar_drafts.py",
    "kernels/speculation/test_native_chains.py",
    "kernels/speculation/test_lossless_runner.py",
    "kernels/speculation/test_padded_vocabulary.py",
    "kernels/speculation/test_rejected_draft_tokens.py",
    "kernels/speculation/test_unobserved_steps.py",
    "kernels/speculation/test_verify.py",
    "kernels/weights/gguf/test_gguf_blocks.py",
    "kernels/weights/gguf/test_gguf_checkpoint.py",
    "kernels/weights/quantization/test_cache_scales.py",
    "kernels/weights/quantization/test_native_fp8.py",
    "kernels/weights/quantization/test_native_grouped.py",
    "kernels/weights/quantization/test_quantized_cache.py",
    "kernels/weights/quantization/test_quantized_engine.py",
    "kernels/weights/quantization/test_quantized_experts.py",
    "kernels/weights/quantization/test_quantized_weights.py",
    "kernels/weights/quantization/test_quantized_words.py",
)
"""Files and folders whose tests compute by the CPU's operators. What decides about numbers, such as planning, loading
and draft policies, does the same on each instruction set and is not here."""
