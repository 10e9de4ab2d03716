"""The engine: the API for Python programs, and the tree of its actors.

engine.py          Engine: generate, embed, score, classify
actor_tree.py      the actors in the order in which they start; replica.py: those of one replica
configuration.py   settings of planner and runner, from the arguments
opening.py         downloads and small files of the models; speculation.py: settings of the draft
lifecycle.py       the phases from start to end; crash_log.py: crashes of actors
status.py          status and health; report.py: what /health and /server_info say of them
reporting.py       periodic log lines, the log of requests; traces.py: spans
nodes.py           the launcher of workers on one or several nodes; ray_nodes.py: nodes that Ray starts
"""
