"""Compiles grammars in threads, and keeps the last results."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from kernels.contract.grammar import Grammar, GrammarSettings
from kernels.grammar.backend import Compiled, GrammarBackend, open_backend

__all__ = ["GrammarCompiler"]

_KEPT = 256
_THREADS = 2


class GrammarCompiler:
    """The grammars of one runner. Thread safe. The library is imported with the first grammar."""

    def __init__(self, settings: GrammarSettings, vocab_size: int) -> None:
        self._settings, self._vocab_size = settings, vocab_size
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._backend: GrammarBackend | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="troupe-grammar")
        self._results: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Future[Compiled]:
        """A result that may not be there yet. It raises GrammarError, or UnsupportedError where there is no backend."""
        with self._lock:
            found = self._results.get(grammar)
            if found is None:
                found = self._results[grammar] = self._threads.submit(self._compile, grammar)
                if len(self._results) > _KEPT:
                    self._results.popitem(last=False)
            else:
                self._results.move_to_end(grammar)
            return found

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> Compiled:
        with self._opening:
            if self._backend is None:
                self._backend = open_backend(self._settings, self._vocab_size)
        return self._backend.compile(grammar)
