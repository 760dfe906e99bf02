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
_LENGTH = struct.Struct("<Q")


def send(channel: socket.socket, header: Mapping[str, Any], blobs: Sequence[Array]) -> None:
    text = json.dumps({**header, "sizes": [blob.nbytes for blob in blobs]}).encode()
    channel.sendall(_LENGTH.pack(len(text)) + text)
    for blob in blobs:
        channel.sendall(bytes_of(blob).data)


def receive(fill: Callable[[memoryview], None], most: int | None = None) -> tuple[dict[str, Any], list[Array]]:
    prefix = bytearray(_LENGTH.size)
    fill(memoryview(prefix))
    (length,) = _LENGTH.unpack(prefix)
    if length > 1 << 20:
        raise ValueError("a header is never that long")
    text = bytearray(length)
    fill(memoryview(text))
    header = json.loads(text)
    if most is not None and sum(header["sizes"]) > most:
        raise ValueError("more bytes than any answer has")
    blobs = []
    for size in header["sizes"]:
        blob = np.empty(size, np.uint8)
        fill(blob.data)
        blobs.append(blob)
    return header, blobs
