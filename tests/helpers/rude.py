"""Clients that send half a request, nonsense, or vanish."""

from __future__ import annotations

import json
import random
import socket
from typing import Any


def request(prompt: str, **fields: Any) -> bytes:
    """A whole request for a completion."""
    raw = json.dumps({"model": "toy", "prompt": prompt, "max_tokens": 30, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    return head.encode() + b"\r\n\r\n" + raw


def misbehave(port: int, number: int) -> None:
    """One rude client: it sends something, listens for a little or not at all, and is gone."""
    dice = random.Random(number)
    whole = request("x = ", max_tokens=900, stream=dice.random() < 0.5)
    sent = dice.choice(
        [
            b"",
            whole,
            whole[: dice.randrange(len(whole))],
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x16\x03\x01" + dice.randbytes(60),
            dice.randbytes(200),
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: x\r\n\r\nzz\r\n",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\nHost: x\r\n\r\n{}",
            b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
            request("x", temperature="hot"),
            request("x")[:-1] + b"\xff",
        ]
    )
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(sent)
            if dice.random() < 0.3:
                client.settimeout(0.05)
                client.recv(100)
            if dice.random() < 0.5:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, no goodbye
    except OSError:
        pass  # it was shown the door
