"""Binary token files: consecutive little-endian uint16 or uint32 ids."""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np

from jfsdp.objects.path import AnyPath, read_at, read_json

_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_CHECKED_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class TokenFormat:
    """The format of a token file.

    Attributes:
      dtype: numpy dtype string, little-endian.
      eod_id: id between documents; None: unknown, the file is one stream.
      vocab_size: upper bound of the ids; None: unknown.
    """

    dtype: str
    eod_id: int | None = None
    vocab_size: int | None = None


def read_token_format(path: AnyPath) -> TokenFormat:
    """Return the format of a token file from its sidecar `FILE.bin.json`.

    The sidecar is a JSON object with "dtype" ("uint16" or "uint32") and, if known, "eod_id" and "vocab_size".

    Raises:
      ValueError: if there is no such object, its dtype is neither of the two, or the end-of-document id exceeds it.
    """
    sidecar = path.with_name(path.name + ".json")
    fields = _read_sidecar(sidecar) if sidecar.exists() else {}
    dtype, eod_id = fields.get("dtype"), fields.get("eod_id")
    if dtype not in _DTYPES:
        raise ValueError(
            f"{path}: the dtype of its tokens is {dtype or 'unknown'}; write "
            f'{{"dtype": "uint16", "eod_id": ID}} (or uint32) to {sidecar.name} next to it'
        )
    most = np.iinfo(_DTYPES[dtype]).max
    if eod_id is not None and not 0 <= eod_id <= most:
        raise ValueError(f"{sidecar}: eod_id={eod_id} must be an id of {dtype}, from 0 to {most:,}")
    return TokenFormat(_DTYPES[dtype], eod_id, fields.get("vocab_size"))


def index_token_file(path: AnyPath, token_format: TokenFormat, limit: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return offsets and lengths, in tokens, of pieces of at most `limit` bytes, and a checksum of both ends.

    The last token of the file is only a target: a piece is read with the next token, the target of its last input.

    Raises:
      ValueError: if the file size is not a multiple of the token size, or the file has fewer than two tokens.
    """
    num_bytes, itemsize = path.stat().st_size, np.dtype(token_format.dtype).itemsize
    if num_bytes % itemsize:
        raise ValueError(
            f"{path}: {num_bytes} bytes are not a multiple of the {itemsize} bytes of a token; copy a truncated file "
            "again, or correct the dtype in its sidecar"
        )
    num_inputs, piece = num_bytes // itemsize - 1, limit // itemsize
    if num_inputs < 1:
        raise ValueError(f"{path}: has {num_inputs + 1} token, but training needs at least two; remove the file")
    offsets = np.arange(0, num_inputs, piece, dtype=np.int64)
    return offsets, np.minimum(piece, num_inputs - offsets), _checksum_of_ends(path, num_bytes)


def read_tokens(path: AnyPath, token_format: TokenFormat, offset: int, length: int) -> np.ndarray:
    """Read `length` tokens from `offset` and the one after them: int64 [length + 1]."""
    itemsize = np.dtype(token_format.dtype).itemsize
    data = read_at(path, offset * itemsize, (length + 1) * itemsize)
    tokens = np.frombuffer(data[: len(data) // itemsize * itemsize], token_format.dtype)
    if len(tokens) != length + 1:
        raise ValueError(
            f"{path}: ends before token {offset + length}, because it changed since the corpus was opened; restore it, "
            "or open the corpus again"
        )
    return tokens.astype(np.int64)


def _read_sidecar(sidecar: AnyPath) -> dict:
    fields = read_json(sidecar, "write an object such as {'dtype': 'uint16'}")
    for name in ("eod_id", "vocab_size"):
        if not isinstance(fields, dict) or not isinstance(fields.get(name, 0), int):
            raise ValueError(f'{sidecar}: expected an object with "dtype" and integers "eod_id", "vocab_size"')
    return fields


def _checksum_of_ends(path: AnyPath, num_bytes: int) -> int:
    with path.open("rb") as file:
        checksum = zlib.crc32(file.read(_CHECKED_BYTES))
        file.seek(max(0, num_bytes - _CHECKED_BYTES))
        return zlib.crc32(file.read(_CHECKED_BYTES), checksum)
