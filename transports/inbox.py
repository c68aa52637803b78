"""A follower's messages, as both buses keep them for it."""

from __future__ import annotations

import asyncio
from typing import Final

from arriero.schemas.errors import BusUnavailable
from arriero.schemas.token import Look, Message

INBOX_MAX: Final = 1_000
"""Messages a slow reader may leave unread. Beyond it they are dropped for one `look`: it reads the stream anyway."""


class Inbox:
    """See the seam's `Subscription`."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()

    async def message(self) -> Message:
        message = await self._messages.get()
        if message is None:
            self._messages.put_nowait(None)
            raise BusUnavailable("the connection to the token bus was lost")
        return message

    def put(self, message: Message) -> None:
        if self._messages.qsize() >= INBOX_MAX:
            while not self._messages.empty():
                self._messages.get_nowait()
            message = Look()
        self._messages.put_nowait(message)

    def lose(self) -> None:
        """Nothing more will come, and something may have been missed."""
        self._messages.put_nowait(None)
