"""Documents as arrays: encoding them on many cores, and cutting the stream into rows of equal length."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tests.understudy.corpus import Mix, documents
from tests.understudy.lessons.conversation import Segment

__all__ = ["LEARN", "Stream", "encode_corpus", "encode_documents", "encode_shard", "rows", "split_by_length"]

LEARN = 1 << 15
"""The bit that marks a learned token in the uint16 of a packed document; ids lie below it."""

Array = np.ndarray[Any, np.dtype[Any]]
_EVEN = Mix()


@dataclass(frozen=True, slots=True)
class Stream:
    """Documents one after another: `tokens` uint16 with the LEARN bit, `bounds` int64, one more than documents."""

    tokens: Array
    bounds: Array


def encode_shard(tokenizer_file: Path, seed: int, count: int, mix: Mix = _EVEN) -> tuple[Array, Array]:
    """Documents of one seed and mix as (tokens, lengths)."""
    return encode_documents(tokenizer_file, documents(seed, count, mix))


def encode_documents(tokenizer_file: Path, texts: Iterable[Sequence[Segment]]) -> tuple[Array, Array]:
    """Documents as (tokens, lengths)."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    @lru_cache(maxsize=10_000)
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    pieces: list[list[int]] = []
    lengths: list[int] = []
    for segments in texts:
        length = 0
        for segment in segments:
            ids = encode(segment.text)
            pieces.append([token | LEARN for token in ids] if segment.learn else ids)
            length += len(ids)
        lengths.append(length)
    flat = np.fromiter((token for piece in pieces for token in piece), dtype=np.uint16)
    return flat, np.array(lengths, dtype=np.int64)


def encode_corpus(
    tokenizer_file: Path, seed: int, count: int, cores: int, context: int, mix: Mix = _EVEN
) -> tuple[Array, Array]:
    """The whole corpus as (tokens, lengths), without documents longer than the context; a shard is 4000 documents."""
    seeds = [seed * 1_000_003 + shard for shard in range(-(-count // 4000))]
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        shards = list(pool.map(partial(encode_shard, tokenizer_file, count=4000, mix=mix), seeds))
    tokens = np.concatenate([shard[0] for shard in shards])
    lengths = np.concatenate([shard[1] for shard in shards])
    fits = lengths <= context
    return tokens[np.repeat(fits, lengths)], lengths[fits]


def split_by_length(tokens: Array, lengths: Array, limit: int) -> tuple[Stream, Stream]:
    """The documents of at most `limit` tokens, and the longer ones: attention's cost goes by the longest of a row."""
    streams = []
    for chosen in (lengths <= limit, lengths > limit):
        bounds = np.concatenate(([0], np.cumsum(lengths[chosen])))
        streams.append(Stream(tokens[np.repeat(chosen, lengths)], bounds))
    return streams[0], streams[1]


def rows(stream: Stream, size: int) -> Iterator[tuple[int, int]]:
    """The document ranges (first, last + 1) of rows that hold at most `size` tokens each."""
    if len(stream.bounds) > 1 and int(np.diff(stream.bounds).max()) > size:
        raise ValueError(f"a row of {size} tokens cannot hold the longest document; give a longer row")
    first = 0
    while first < len(stream.bounds) - 1:
        last = int(np.searchsorted(stream.bounds, stream.bounds[first] + size, side="right")) - 1
        yield first, last
        first = last
