"""The key-value cache: its pages, hits of the prefix cache, and shortages."""

from __future__ import annotations

from telemetry.dashboards.board import Board, Row
from telemetry.dashboards.panels import BLUE, GREEN, ORANGE, RED, TEXT, Heatmap, Query, Stat, TimeSeries, bad_above
from telemetry.dashboards.promql import buckets, events, rate

__all__ = ["CACHE"]

_HITS, _QUERIED = "troupe_cache_hit_tokens_total", "troupe_cache_queried_tokens_total"
_TOKENS, _INPUT, _OUTPUT = "troupe_tokens_total", 'gen_ai_token_type="input"', 'gen_ai_token_type="output"'


def _hit_ratio(by: str = "") -> str:
    return f"{rate(_HITS, by)} / {rate(_QUERIED, by)}"


_NOW = Row(
    "Now",
    (
        Stat(
            "In use",
            "Pages that running sequences hold.",
            (Query("sum(troupe_cache_pages_used{@}) / sum(troupe_cache_pages{@})"),),
            unit="percentunit",
            maximum=1,
            width=4,
            thresholds=bad_above(0.8, 0.95),
        ),
        Stat(
            "Prefix hits",
            "Share of the prompt tokens looked up that were found in the prefix cache.",
            (Query(_hit_ratio()),),
            unit="percentunit",
            maximum=1,
            width=4,
            base=TEXT,
        ),
        Stat(
            "Tokens it can hold",
            "Pages times tokens of a page, all servers together.",
            (Query("sum(troupe_cache_pages{@} * troupe_cache_page_tokens{@})"),),
            width=4,
            base=TEXT,
        ),
        Stat(
            "Memory",
            "Bytes of the key-value caches, all servers together.",
            (Query("sum(troupe_cache_bytes{@})"),),
            unit="bytes",
            width=4,
            base=TEXT,
        ),
        Stat(
            "Preemptions now",
            "Sequences per second that released their pages and are recomputed: lost work.",
            (Query(rate("troupe_preemptions_total")),),
            unit="ops",
            width=4,
            thresholds=bad_above(0.01, 0.1),
        ),
        Stat(
            "Evictions now",
            "Evicted pages per second. Many, with many hits before: a larger cache helps.",
            (Query(rate("troupe_cache_evicted_pages_total")),),
            unit="si:pages/s",
            width=4,
            base=TEXT,
        ),
    ),
)

_PAGES = Row(
    "Pages",
    (
        TimeSeries(
            "Pages",
            "used: held by running sequences; evictable: cached prefixes not in use; free: empty.",
            (
                Query("sum(troupe_cache_pages_used{@})", "used"),
                Query("sum(troupe_cache_pages_evictable{@})", "evictable"),
                Query("sum(troupe_cache_pages_free{@})", "free"),
            ),
            width=12,
            stack=True,
            colors=(("used", ORANGE), ("evictable", BLUE), ("free", GREEN)),
        ),
        TimeSeries(
            "In use by server",
            "Share of each server's pages that running sequences hold.",
            (
                Query(
                    "sum by (instance) (troupe_cache_pages_used{@}) / sum by (instance) (troupe_cache_pages{@})",
                    "{{instance}}",
                ),
            ),
            unit="percentunit",
            maximum=1,
            width=12,
            thresholds=((0.95, RED),),
        ),
    ),
)

_GROUPS = Row(
    "Cache groups",
    (
        TimeSeries(
            "In use by group",
            "Share of each group's pages that sequences hold. Models whose layers keep windows or states have several.",
            (
                Query(
                    'sum by (group) (troupe_cache_group_pages{state="used",@})'
                    " / sum by (group) (troupe_cache_group_pages{@})",
                    "{{group}}",
                ),
            ),
            unit="percentunit",
            maximum=1,
            width=12,
            thresholds=((0.95, RED),),
        ),
        TimeSeries(
            "Evicted pages by group",
            "Evicted pages per second. A group that evicts while others are empty is the short one.",
            (Query(rate("troupe_cache_group_evicted_pages_total", "group"), "{{group}}"),),
            unit="si:pages/s",
            width=12,
        ),
    ),
)

_PREFIXES = Row(
    "Prefix cache",
    (
        TimeSeries(
            "Prompt tokens looked up",
            "Found in the cache, or to be computed.",
            (
                Query(rate(_HITS), "found"),
                Query(f"{rate(_QUERIED)} - {rate(_HITS)}", "to compute"),
            ),
            unit="si:tok/s",
            stack=True,
            colors=(("found", GREEN), ("to compute", ORANGE)),
        ),
        TimeSeries(
            "Hit ratio by server",
            "Share of prompt tokens that each server found. If uneven, let the router keep prefixes together.",
            (Query(_hit_ratio("instance"), "{{instance}}"),),
            unit="percentunit",
            maximum=1,
        ),
        TimeSeries(
            "Input tokens of ended requests",
            "As reported in usage: cached tokens and the rest.",
            (
                Query(rate("troupe_cached_tokens_total"), "cached"),
                Query(f"{rate(_TOKENS, where=_INPUT)} - {rate('troupe_cached_tokens_total')}", "computed"),
            ),
            unit="si:tok/s",
            stack=True,
            colors=(("cached", GREEN), ("computed", ORANGE)),
        ),
    ),
)

_PRESSURE = Row(
    "When it is short",
    (
        TimeSeries(
            "Preemptions",
            "Sequences that released their pages since the previous point. Lower --max-running-requests or add memory.",
            (Query(events("troupe_preemptions_total"), "{{instance}}"),),
            bars=True,
            decimals=0,
            shown=("sum", "max"),
        ),
        TimeSeries(
            "Evicted pages",
            "Evicted pages per second.",
            (Query(rate("troupe_cache_evicted_pages_total", "instance"), "{{instance}}"),),
            unit="si:pages/s",
        ),
        TimeSeries(
            "Prompt tokens that wait or run",
            "waiting: in the queues; admitted: of all admitted requests; against the tokens that the caches hold.",
            (
                Query("sum(troupe_waiting_tokens{@})", "waiting"),
                Query("sum(troupe_admitted_tokens{@})", "admitted"),
                Query("sum(troupe_cache_pages{@} * troupe_cache_page_tokens{@})", "the caches hold"),
            ),
            colors=(("the caches hold", TEXT),),
        ),
    ),
)

_LENGTHS = Row(
    "Lengths of requests",
    (
        TimeSeries(
            "Mean tokens of a request",
            "Prompt and generated tokens of ended requests.",
            (
                Query(f"{rate(_TOKENS, where=_INPUT)} / {rate('troupe_requests_total')}", "prompt"),
                Query(f"{rate(_TOKENS, where=_OUTPUT)} / {rate('troupe_requests_total')}", "generated"),
            ),
        ),
        Heatmap(
            "Prompt tokens",
            "How many requests, by the length of their prompt. Needs --collect-tokens-histogram.",
            buckets("troupe_input_tokens"),
        ),
        Heatmap(
            "Generated tokens",
            "How many requests, by their generated tokens. Needs --collect-tokens-histogram.",
            buckets("troupe_output_tokens"),
        ),
    ),
)

CACHE = Board(
    "troupe-cache",
    "Troupe: cache",
    "The key-value cache: its pages, hits of the prefix cache, and shortages.",
    (_NOW, _PAGES, _GROUPS, _PREFIXES, _PRESSURE, _LENGTHS),
)
