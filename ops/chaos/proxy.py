"""A TCP proxy that can be cut and slowed: the network between workers and brokers."""

from __future__ import annotations

import asyncio
import contextlib


class Proxy:
    """Listens on `port` and connects to `target_port`, both on the loopback. An async context manager."""

    def __init__(self, port: int, target_port: int) -> None:
        self.port = port
        self._target_port = target_port
        self.delay_s = 0.0
        """Added to everything that passes, each way."""
        self._cut = False
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._drop()

    async def cut(self) -> None:
        """Drop every connection, and refuse new ones until `mend`."""
        self._cut = True
        await self._drop()

    def mend(self) -> None:
        self._cut, self.delay_s = False, 0.0

    async def _drop(self) -> None:
        links = list(self._links)
        for link in links:
            link.cancel()
        if links:
            await asyncio.wait(links)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        try:
            if not self._cut:
                await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # the task is this connection: its end is the connection's
        finally:
            self._links.discard(link)
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        pipes = [
            asyncio.create_task(self._pipe(reader, far_writer), name="proxy up"),
            asyncio.create_task(self._pipe(far_reader, writer), name="proxy down"),
        ]
        try:
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pipe in pipes:
                pipe.cancel()
            await asyncio.wait(pipes)
            far_writer.close()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
