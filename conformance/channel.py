"""How the runner and a child speak: a length, that much JSON, then the raw bytes that the JSON's "sizes" announces."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mxgate.conformance.launch import Array, bytes_of

CLOSED = 117  # the exit status of a child whose channel was closed under it
HEADER = 1 << 20  # bytes that no header reaches
_LENGTH = struct.Struct("<Q")


def send(channel: socket.socket, header: Mapping[str, Any], blobs: Sequence[Array]) -> None:
    """Send one message. header: JSON types, without "sizes". blobs: C-contiguous arrays, their bytes alone: dtypes and
    shapes are the header's business. OSError where the other side is gone, TimeoutError where it does not read."""
    text = json.dumps({**header, "sizes": [blob.nbytes for blob in blobs]}).encode()
    channel.sendall(_LENGTH.pack(len(text)) + text)
    for blob in blobs:
        channel.sendall(bytes_of(blob).data)


def receive(fill: Callable[[memoryview], None], most: int | None = None) -> tuple[dict[str, Any], list[Array]]:
    """(header, blobs as flat uint8 arrays) of the next message.

    fill: reads exactly as many bytes as its argument has room for, and raises what it likes. most: bytes of blobs above
    which none is read; None for any number. ValueError, KeyError or TypeError for bytes that are no message.
    """
    prefix = bytearray(_LENGTH.size)
    fill(memoryview(prefix))
    (length,) = _LENGTH.unpack(prefix)
    if length > HEADER:
        raise ValueError(f"a header of {length} bytes; expected {HEADER} at most")
    text = bytearray(length)
    fill(memoryview(text))
    header = json.loads(text)
    if most is not None and sum(header["sizes"]) > most:
        raise ValueError(f"{sum(header['sizes'])} bytes of arrays; expected {most} at most")
    blobs = []
    for size in header["sizes"]:
        blob = np.empty(size, np.uint8)
        fill(blob.data)
        blobs.append(blob)
    return header, blobs
