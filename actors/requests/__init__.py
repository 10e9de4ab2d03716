"""Requests between the APIs and the scheduler.

admission.py          permits: a request is counted before anything is awaited for it, or refused
intake.py             Intake: encodes, journals and submits requests, and releases them at their end
router.py             the replica of a request     streams.py: RequestStream, its results for the caller
request_rules.py      RequestRules: what one request may ask of the server and its model
prefix_index.py       which replica has seen which prefixes   adapters.py: LoRA adapters by name
sampling_rules.py     SamplingParams, checked and completed -> SlotSampling, what the worker gets
grammar_compiles.py   grammars are compiled before the request is submitted
drain_rate.py         when a refused client should try again
outcomes.py           awaits the first of several coroutines, or the end of a task
"""
