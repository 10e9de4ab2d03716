"""Compiles grammars in threads, and keeps the last results."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from kernels.contract.errors import UnsupportedError
from kernels.contract.grammar import Grammar, GrammarError, GrammarSettings
from kernels.grammar.backend import Compiled, GrammarBackend, Matcher

__all__ = ["GrammarCompiler", "open_backend"]

_ERROR_CHARS = 400

_KEPT = 256
_KEPT_ERRORS = 64
_THREADS = 2


class GrammarCompiler:
    """The grammars of one runner. Thread safe. The library is imported with the first grammar."""

    def __init__(self, settings: GrammarSettings, vocab_size: int) -> None:
        self._settings, self._vocab_size = settings, vocab_size
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._backend: GrammarBackend | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="troupe-grammar")
        self._results: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._errors: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        """Apart, so that wrong grammars push out no good ones."""

    def compile(self, grammar: Grammar) -> Future[Compiled]:
        """A result that may not be there yet. It raises GrammarError, or UnsupportedError where there is no backend."""
        with self._lock:
            for kept in (self._results, self._errors):
                if grammar in kept:
                    kept.move_to_end(grammar)
                    return kept[grammar]
            result = self._results[grammar] = self._threads.submit(self._compile, grammar)
            if len(self._results) > _KEPT:
                self._results.popitem(last=False)
        result.add_done_callback(lambda done: self._set_apart(grammar, done))
        return result

    def _set_apart(self, grammar: Grammar, done: Future[Compiled]) -> None:
        """Keep an error apart from good results."""
        if done.cancelled() or done.exception() is None:
            return
        with self._lock:
            if self._results.get(grammar) is done:
                del self._results[grammar]
                self._errors[grammar] = done
                if len(self._errors) > _KEPT_ERRORS:
                    self._errors.popitem(last=False)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> Compiled:
        with self._opening:
            if self._backend is None:
                self._backend = open_backend(self._settings, self._vocab_size)
        try:
            compiled = self._backend.compile(grammar)
            self._try(compiled())
        except GrammarError as error:
            raise GrammarError(_one_line(str(error))) from error
        return compiled

    def _try(self, text: Matcher) -> None:
        """Take a first token, so that a grammar without any text, or over the library's limits, fails here. Raises
        GrammarError."""
        row = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
        text.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), count=self._vocab_size, bitorder="little"))
        if not len(allowed):
            raise GrammarError("no text matches it")
        first = int(allowed[0])
        if first not in self._settings.eos_ids and not text.accept(first):
            raise GrammarError("it has too many alternatives for this backend")


def open_backend(settings: GrammarSettings, vocab_size: int) -> GrammarBackend:
    """Import the library and read the tokenizer: up to a second. ``vocab_size``: width of the logits.

    Raises UnsupportedError.
    """
    name = settings.backend
    try:
        if name == "xgrammar":
            from kernels.grammar.xgrammar_backend import XGrammar

            return XGrammar(settings, vocab_size)
        from kernels.grammar.llguidance_backend import LlGuidance

        return LlGuidance(settings, vocab_size)
    except ImportError as error:
        raise UnsupportedError(
            f'--grammar-backend {name} needs the package {name}: pip install "troupe-llm[{name}]" ({error})'
        ) from error
    except (ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"{name} cannot read this model's tokenizer ({_one_line(str(error))}); try the other --grammar-backend"
        ) from error


def _one_line(message: str) -> str:
    """Printable, and short enough for an error of the API."""
    line = " ".join(message.split())
    return "".join(sign if sign.isprintable() else "?" for sign in line)[:_ERROR_CHARS]
