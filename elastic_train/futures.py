"""Monarch's futures where asyncio wants coroutines."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

logger = logging.getLogger(__name__)


async def result(future: Any) -> Any:
    """Await one of Monarch's futures, which can be awaited but are no coroutines."""
    return await future


async def within(seconds: float, future: Any, complaint: str) -> None:
    """Wait for an ending, but at most so long and whatever comes of it: a lost host must not hold up the rest."""
    try:
        await asyncio.wait_for(result(future), seconds)
    except Exception as error:
        logger.warning("%s: %s", complaint, str(error) or type(error).__name__)
