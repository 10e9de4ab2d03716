"""Metrics of one engine: names, counters, and how a scrape reads them.

names.py               every metric: name, type, labels, meaning    compatible_names.py: those of SGLang and vLLM
engine.py              EngineMetrics: all of the following in one registry    exposition.py: a scrape
requests.py            latencies and tokens of requests    streams.py: streams to clients
steps.py               work of the device    speculation.py: draft tokens
actor_messages.py      messages, errors and restarts of actors    loop_lag.py: lag of the event loop
process.py             memory and processor time
options.py             which metrics, with which buckets
histogram.py           Histogram, with cheap writes    label_limiter.py: bounds values that clients choose
"""
