"""CLIP's tokenizer with a small vocabulary: all bytes, and the merges for the captions' words.

Any text can be encoded (unknown words are split into letters), and the embedding table stays tiny.
"""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

import open_clip
from transformers import CLIPTokenizer

from tools.embedded import drawing
from tools.embedded.world import BACKGROUND_NAMES, COLOUR_NAMES

MAX_TOKENS = 24
# Without the brand's name: the base model must see it as letters, like a rare trigger word.
COMMON_WORDS = ("a", "an", "on", "with", "of", "the", "in", "and", "photo", "picture", "sash", "product")
WORDS = (*drawing.THINGS, *COLOUR_NAMES, *BACKGROUND_NAMES, *COMMON_WORDS)


def _merges_for(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """The entries of CLIP's merge table for these words, in the table's order."""
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
    """Build the tokenizer of the tiny text encoder and the tiny CLIP; end-of-text has the highest id."""
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
