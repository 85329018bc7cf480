"""Tokenizers: bytes, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jfsdp.checkpoint.disk.paths import existing_path
from jfsdp.extras import load
from jfsdp.objects.path import read_json

# The end-of-document token of a tokenizer.json is the first of these in its vocabulary, else `eos_token` of its
# configuration. `eod_token` overrides it.
END_OF_DOCUMENT_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|im_end|>")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ByteTokenizer:
    """Tokenizer whose ids 0..255 are the bytes of the UTF-8 text. Id 256 separates documents.

    Attributes:
      name: identity in iterator states; equal names must mean equal ids for equal text.
      vocab_size: largest id + 1.
      eod_id: id between documents.
      start_ids: int32 [n], ids before a text: the tokens that the tokenizer adds (Llama's BOS), or else `eod_id`.
      special_tokens: ids by text, such as "<|im_end|>".
    """

    name = "byte"
    vocab_size = 257
    eod_id = 256
    start_ids = np.array([256], np.int32)
    special_tokens: Mapping[str, int] = MappingProxyType({})

    def encode_chat(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Raise an error, because bytes have no special token to end a turn."""
        raise ValueError("conversations need special tokens, but bytes have none; give a tokenizer.json by --tokenizer")

    def encode(self, text: str) -> np.ndarray:
        """Return the UTF-8 bytes of `text` as int32 [n]."""
        return np.frombuffer(as_text(text).encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, *, special: bool = False) -> str:
        """Return the text; invalid UTF-8 becomes U+FFFD. `eod_id` is omitted, or "<eod>" with `special`."""
        ids = np.asarray(ids)
        if special:
            parts = np.split(ids, np.flatnonzero(ids == self.eod_id))
            return "<eod>".join(self.decode(part) for part in parts)
        return ids[ids < self.eod_id].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """Tokenizer of a `tokenizer.json`, with the attributes of `ByteTokenizer`."""

    def __init__(self, tokenizer: Any, eod_id: int, name: str):
        self._tokenizer = tokenizer
        self.eod_id = eod_id
        self.name = name
        # Not get_vocab_size(), because ids may have gaps.
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        added = tokenizer.get_added_tokens_decoder().items()
        self.special_tokens: Mapping[str, int] = {token.content: id for id, token in added if token.special}
        special = set(self.special_tokens.values())
        first = list(itertools.takewhile(special.__contains__, tokenizer.encode("a").ids))
        self.start_ids = np.array(first or [eod_id], np.int32)
        # Parses special tokens in the text, and gives offsets to tokens of white space.
        text = tokenizer.to_str().replace('"trim_offsets":true', '"trim_offsets":false')
        self._parsing = type(tokenizer).from_str(text)

    def encode_chat(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return ids int32 [n] of a rendered chat, with its special tokens, and character offsets int [n 2]."""
        found = self._parsing.encode(as_text(text), add_special_tokens=False)
        return np.array(found.ids, np.int32), np.array(found.offsets, np.int64).reshape(-1, 2)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text` as int32 [n], without special tokens."""
        return np.array(self._tokenizer.encode(as_text(text), add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, *, special: bool = False) -> str:
        """Return the text of `ids`; with `special`, including special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not special)


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def as_text(text: str) -> str:
    """Replace lone surrogates, which JSON may contain and UTF-8 cannot encode, by "?"."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


def load_tokenizer(tokenizer: str = "byte", *, eod_token: str | None = None) -> Tokenizer:
    """Load a tokenizer by name or path.

    The text of a special token in a document ("<|endoftext|>" in a text about tokenizers) is encoded as ordinary text,
    so that documents cannot forge boundaries.

    Args:
      tokenizer: "byte", or the path of a `tokenizer.json` of the Hugging Face `tokenizers` library (or its directory).
      eod_token: token that ends a document; None: the first of `END_OF_DOCUMENT_TOKENS` in the vocabulary, or the
        `eos_token` of the `tokenizer_config.json` in the same directory.

    Raises:
      ValueError: if the file is missing or not a tokenizer, or has no end-of-document token.
    """
    if tokenizer == "byte":
        if eod_token is not None:
            raise ValueError(f"eod_token={eod_token!r}: the byte tokenizer ends documents with id 256; leave it out")
        return ByteTokenizer()
    loaded, path, content = read_tokenizer(tokenizer)
    eod_id = _find_eod(loaded, path, eod_token)
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    return HuggingFaceTokenizer(loaded, eod_id, f"{path.name}:{digest}:eod={eod_id}")


def read_config(directory: Path) -> dict[str, Any]:
    """Return the `tokenizer_config.json` of a directory; empty if it has none.

    Raises:
      ValueError: if it is not JSON.
    """
    path = directory / "tokenizer_config.json"
    stated = read_json(path, "copy it again from the tokenizer's source") if path.exists() else {}
    return stated if isinstance(stated, dict) else {}


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Return the special tokens of the tokenizer's configuration, by their names in chat templates."""
    stated = {name: token for name, token in read_config(directory).items() if name in _SPECIAL and token}
    return {name: token["content"] if isinstance(token, dict) else str(token) for name, token in stated.items()}


def read_tokenizer(tokenizer: str) -> tuple[Any, Path, bytes]:
    """Read a `tokenizer.json`, or the one in a directory. Return the library's tokenizer, its path and its bytes.

    Raises:
      ValueError: if the file is missing or not a tokenizer.
    """
    tokenizers, path = load("tokenizers"), existing_path(tokenizer, " --include '*.j*'")
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = path.read_bytes()
        loaded = tokenizers.Tokenizer.from_buffer(content)
    except OSError as error:
        raise ValueError(
            f"tokenizer {str(path)!r}: {error.strerror}; pass a tokenizer.json by --tokenizer PATH, or byte"
        ) from error
    except Exception as error:  # the library raises plain Exception and ValueError
        raise ValueError(
            f"tokenizer {str(path)!r}: not a tokenizer.json of the tokenizers library ({error}); save one with "
            "Tokenizer.save, or pass 'byte'"
        ) from error
    loaded.encode_special_tokens = True
    return loaded, path, content


def _find_eod(loaded: Any, path: Path, eod_token: str | None) -> int:
    stated = read_special_tokens(path.parent).get("eos_token")
    candidates = (*END_OF_DOCUMENT_TOKENS, *filter(None, [stated])) if eod_token is None else (eod_token,)
    for token in candidates:
        if (eod_id := loaded.token_to_id(token)) is not None:
            return eod_id
    raise ValueError(
        f"tokenizer {str(path)!r}: none of {', '.join(candidates)} is in its vocabulary of {loaded.get_vocab_size()} "
        "tokens; name the token that ends a document with eod_token="
    )
