"""Encoded images held in memory up to a limit, and handed over TCP to whoever asks for them."""

from __future__ import annotations

import hmac
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["PATIENCE_SECONDS", "Shelf", "ShelfLink", "ShelfServer"]

PATIENCE_SECONDS = 10.0
"""Longest wait for another worker's answer; after that its images are read from storage."""
_POLL_SECONDS = 0.05
"""How soon a server notices that it is to close."""
_REQUEST = struct.Struct("!BQI")
"""What is wanted, the sample's id, and the bytes that follow."""
_ANSWER = struct.Struct("!BI")
"""How the shelf stands to the sample, and the bytes that follow."""
_GET, _PUT = 0, 1
_HELD, _WANTED, _NO_ROOM = 0, 1, 2


class Shelf:
    """Encoded images by sample id.

    What came first stays: every epoch needs every image once, so whatever is put out for another
    would be missed just as much, and a cache that forgets the least recently used would keep losing
    what comes next.

    Args:
        limit_bytes: Most bytes to hold.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._images: dict[int, bytes] = {}
        self.held_bytes = 0
        """Bytes held now."""
        self.full = limit_bytes == 0
        """True once an image did not fit: no more are asked for."""

    def __len__(self) -> int:
        return len(self._images)

    def get(self, sample: int) -> bytes | None:
        """The image, where it is held."""
        return self._images.get(sample)

    def offer(self, sample: int, encoded: bytes) -> None:
        """Keep an image, where there is room."""
        with self._lock:
            if sample in self._images or self.full:
                return
            if self.held_bytes + len(encoded) > self._limit:
                self.full = True
                return
            self._images[sample] = encoded
            self.held_bytes += len(encoded)

    def keep(self, wanted: Callable[[int], bool], limit_bytes: int) -> None:
        """Let go of the images that are not wanted, and go on with another limit."""
        with self._lock:
            self._images = {k: image for k, image in self._images.items() if wanted(k)}
            self.held_bytes = sum(map(len, self._images.values()))
            self._limit = limit_bytes
            self.full = self.held_bytes >= limit_bytes


class ShelfServer:
    """Answers for one shelf, on a thread per connection.

    Args:
        shelf: What to give from and to put on.
        host: Address to listen at.
        token: Callers have to begin with these bytes.
    """

    def __init__(self, shelf: Shelf, host: str, token: bytes) -> None:
        self._server = _Server((host, 0), _Caller)
        self._server.shelf = shelf
        self._server.token = token
        self.address: tuple[str, int] = (host, self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Take no more callers; those that are connected find an empty shelf without room."""
        self._server.shelf = Shelf(0)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class ShelfLink:
    """A connection to another worker's shelf.

    Raises:
        OSError: From any method, where the other side is gone or does not answer in time.
    """

    def __init__(self, address: tuple[str, int], token: bytes) -> None:
        self._socket = socket.create_connection(address, timeout=PATIENCE_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")
        self._socket.sendall(token)

    def get(self, sample: int) -> tuple[bytes | None, bool]:
        """The image, or None and whether the shelf would like to have it."""
        self._socket.sendall(_REQUEST.pack(_GET, sample, 0))
        state, length = _ANSWER.unpack(self._read(_ANSWER.size))
        if state == _HELD:
            return self._read(length), False
        return None, state == _WANTED

    def put(self, sample: int, encoded: bytes) -> None:
        """Hand an image over."""
        self._socket.sendall(_REQUEST.pack(_PUT, sample, len(encoded)) + encoded)

    def close(self) -> None:
        """Hang up."""
        self._answers.close()
        self._socket.close()

    def _read(self, count: int) -> bytes:
        found = self._answers.read(count)
        if len(found) < count:
            raise ConnectionError("the other worker hung up")
        return found


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    shelf: Shelf
    token: bytes

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that ended in mid-sentence: it asks again, or is no more."""


class _Caller(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True
    server: _Server

    def handle(self) -> None:
        if not hmac.compare_digest(self.rfile.read(len(self.server.token)), self.server.token):
            return
        while len(request := self.rfile.read(_REQUEST.size)) == _REQUEST.size:
            what, sample, length = _REQUEST.unpack(request)
            shelf = self.server.shelf  # another one once the server is closed
            if what == _PUT:
                encoded = self.rfile.read(length)
                if len(encoded) == length:
                    shelf.offer(sample, encoded)
                continue
            held = shelf.get(sample)
            if held is not None:
                self.wfile.write(_ANSWER.pack(_HELD, len(held)) + held)
            else:
                self.wfile.write(_ANSWER.pack(_NO_ROOM if shelf.full else _WANTED, 0))
