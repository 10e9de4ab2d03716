"""Launchers of worker processes. A launcher is a class with one method; see ``WorkerLauncher``."""
