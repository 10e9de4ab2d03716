"""Constrained decoding: which tokens a request's grammar allows next.

``backend``   one interface to the libraries that know grammars, ``llguidance`` and ``xgrammar``
``compiler``  compiles in threads, and keeps the last results
``slots``     the automaton of each slot, and the masks of a step
"""
