"""The channel: what is sent arrives, and what no child of ours would say is refused.

Not covered: a peer that stops in the middle, which the tests of a child have.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mxgate.conformance.channel import receive, send
from mxgate.conformance.launch import Array


def _said(data: bytes, most: int | None = None) -> tuple[dict[str, Any], list[bytes]]:
    left = memoryview(data)

    def fill(into: memoryview) -> None:
        nonlocal left
        into[:] = left[: len(into)]
        left = left[len(into) :]

    header, blobs = receive(fill, most)
    assert not left
    return header, [blob.tobytes() for blob in blobs]


def _sent(header: dict[str, Any], *blobs: Array) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, header, blobs)
        ours.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: theirs.recv(1 << 16), b""))


def test_what_is_sent_arrives() -> None:
    blobs = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3), np.zeros((0, 4), np.float32), np.ones(1, np.uint8)
    header, back = _said(_sent({"do": "call", "seed": None}, *blobs), most=13)
    assert header == {"do": "call", "seed": None, "sizes": [12, 0, 1]}
    assert back == [blob.tobytes() for blob in blobs]


def test_more_than_any_answer_has_is_refused() -> None:
    sent = _sent({}, np.zeros(5, np.uint8))
    assert _said(sent, most=5) == _said(sent) == ({"sizes": [5]}, [bytes(5)])
    with pytest.raises(ValueError, match="5 bytes of arrays; expected 4 at most"):
        _said(sent, most=4)
    text = json.dumps({"sizes": [], "text": "a" * (1 << 20)}).encode()
    with pytest.raises(ValueError, match=f"a header of {len(text)} bytes; expected {1 << 20} at most"):
        _said(len(text).to_bytes(8, "little") + text)
