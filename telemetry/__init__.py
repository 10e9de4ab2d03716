"""Timelines of requests, and what is made from them: metrics, traces, logs and dashboards.

timeline.py    RequestTimeline: the hops and marks of one request; TimelineListener: what reads them
metrics/       counters for Prometheus    traces/: spans for OpenTelemetry
logs/          log records and their output; request_log.py, step_log.py: logs of requests and steps
dashboards/    dashboards and alerts for Grafana and Prometheus, generated
"""
