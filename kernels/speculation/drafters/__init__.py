"""Algorithms of draft tokens, one a file, all with the contract of ``kernels.speculation.drafter``.

eagle.py, mtp.py    a decoder layer over the target's hidden states; heads.py: their common part
dflash.py           a whole block in one pass
standalone.py       a smaller model with the same vocabulary
ngram.py            n-grams seen before; trie.py, trie_source.py: where they are kept
"""
