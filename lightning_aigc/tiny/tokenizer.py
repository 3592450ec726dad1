"""CLIP's tokenizer with a small vocabulary: every byte, and the merges that our captions need.

Any text can be encoded (unknown words fall apart into letters), and the embedding table stays tiny.
"""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

import open_clip
from transformers import CLIPTokenizer

from lightning_aigc.tiny import drawing
from lightning_aigc.tiny.world import BACKGROUND_NAMES, COLOUR_NAMES

MAX_TOKENS = 24
# The brand's name is left out: to the base model it is letters, as a rare trigger word should be.
COMMON_WORDS = ("a", "an", "on", "with", "of", "the", "in", "and", "photo", "picture", "sash", "product")
WORDS = (*drawing.THINGS, *COLOUR_NAMES, *BACKGROUND_NAMES, *COMMON_WORDS)


def _merges_for(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """The rows of CLIP's merge table that build these words, in the table's order."""
    table_file = Path(open_clip.__file__).with_name("bpe_simple_vocab_16e6.txt.gz")
    lines = gzip.decompress(table_file.read_bytes()).decode().split("\n")[1 : 49152 - 256 - 2 + 1]
    rank = {tuple(line.split()): i for i, line in enumerate(lines)}
    used: set[tuple[str, str]] = set()
    for word in words:
        pieces = [*word[:-1], word[-1] + "</w>"]
        while len(pieces) > 1:
            pair = min(pairwise(pieces), key=lambda p: rank.get(p, len(rank)))
            if pair not in rank:
                break
            used.add(pair)
            i = list(pairwise(pieces)).index(pair)
            pieces[i : i + 2] = ["".join(pair)]
    return sorted(used, key=rank.__getitem__)


def build_tokenizer() -> CLIPTokenizer:
    """The tokenizer of the tiny text encoder and of the tiny CLIP; end-of-text has the highest id."""
    letters = list(open_clip.tokenizer.bytes_to_unicode().values())
    merges = _merges_for(WORDS)
    tokens = [
        *letters,
        *(x + "</w>" for x in letters),
        *("".join(pair) for pair in merges),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_TOKENS)
