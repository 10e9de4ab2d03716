"""Runs steps: loads a model, takes each step through its executors and packs the results.

runner.py            ModelRunner: the worker's interface; encoder_runner.py: the same for encoders
opening.py           from RunnerConfig to open files, with what the model does not support refused
load.py              from open files to a loaded model, its caches and slots; step_memory.py: the memory of a step
executor_list.py     which executors there are, in the order in which they are tried
executors/           one file for each way to run a step (its page has the table)
pending_step.py      PendingStep: a step before an executor has taken it, and what every executor needs
captures.py          captures of passes and of whole steps
outputs.py           from hidden states to sampled tokens; result_builder.py: packs them into a StepResult
layer_groups.py      the caches of each group of layers; pooled.py: embeddings and classes
rebalancing.py       moves experts between ranks by the tokens that each takes
warmup.py            first steps at load; device_errors.py: errors of a device, for users
"""
