"""A client of the local cloud's control endpoint: notices and kills on purpose."""

from __future__ import annotations

import aiohttp


class FaultsUnsupported(Exception):
    """This cluster's machines cannot be given faults from here."""


class LocalCloud:
    """`base_url` empty means a cluster without fault injection."""

    def __init__(self, base_url: str, token: str) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}

    async def notice(self, node_id: str, deadline_s: float) -> None:
        await self._post(f"/v1/nodes/{node_id}/notice", {"deadline_s": deadline_s, "kind": "terminate"})

    async def kill(self, node_id: str) -> None:
        await self._post(f"/v1/nodes/{node_id}/kill", {})

    async def _post(self, path: str, body: dict[str, object]) -> None:
        if not self._base_url:
            raise FaultsUnsupported(
                "fault injection needs the local cluster of `tideover up`; this one has no such cloud"
            )
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
            session.post(self._base_url + path, json=body) as response,
        ):
            if response.status >= 400:
                raise FaultsUnsupported(f"the local cloud refused {path}: {response.status} {await response.text()}")
