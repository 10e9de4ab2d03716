"""What actors know of the kernels: plain data and errors, without torch. The only part of kernels that actors import.

step.py            StepBatch and StepResult, the messages of a step; SlotSampling: sampling parameters of a slot
runner.py          the interface of a runner; config.py: RunnerConfig; info.py: ModelInfo, facts about a loaded model
caches.py          cache specs and cache groups: paged, window, latent, state
tasks.py           generate, embed, score, classify; pooling.py: how hidden states become a vector or classes
grammar.py         the grammar of an answer; speculation.py: settings of draft tokens
topology.py        rank, role and id of a worker; errors.py: errors of loading; limits.py: bounds of a model's sizes
adapters.py        LoRA adapters    divisions.py: what the number of devices must divide
expert_settings.py where experts are, and when they move; expert_placement.py: places them by their tokens
model_files.py     metadata of GGUF files
cpu_isa.py, npu_simulator.py, environment.py    what a process needs before it imports torch
"""
