"""Timelines of requests, and what is made from them: metrics, traces, logs and dashboards."""
