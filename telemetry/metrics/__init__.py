"""Metrics of one engine: names, counters, and how a scrape reads them."""
