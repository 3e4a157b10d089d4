"""A client of the AWS instance metadata service, version 2 only.

There is no falling back to version 1, which answers without a token: an instance that requires tokens would turn an expired
one into silence. Proxies in the environment are bypassed, since the service is link-local.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import aiohttp

from worker.preemption.source import SourceUnavailable

TOKEN_TTL_S = 21600  # the longest that AWS gives
REFRESH_AT = 0.9  # of the token's life
_MAX_BODY = 65536


class ImdsClient:
    """`clock` is monotonic, in seconds. Raises SourceUnavailable for whatever is no answer."""

    def __init__(self, base_url: str, clock: Callable[[], float], timeout_s: float = 1.0) -> None:
        self._base_url = base_url.rstrip("/")
        self._clock = clock
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._token = ""
        self._token_until = 0.0

    async def get(self, path: str) -> str | None:
        """The text at `path`; None for a 404, which is how the service says "nothing"."""
        for _attempt in range(2):
            status, text = await self._request("GET", path, {"X-aws-ec2-metadata-token": await self._valid_token()})
            if status != 401:
                return self._answer(path, status, text)
            self._token = ""  # expired early, or the service restarted: once more with a new one
        raise SourceUnavailable(f"{self._base_url}{path}: 401 with a token just given out")

    def _answer(self, path: str, status: int, text: str) -> str | None:
        if status == 404:
            return None
        if status != 200:
            raise SourceUnavailable(f"{self._base_url}{path}: HTTP {status} {text[:200]!r}")
        return text

    async def _valid_token(self) -> str:
        if self._token and self._clock() < self._token_until:
            return self._token
        asked = self._clock()
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        status, text = await self._request("PUT", "/latest/api/token", headers)
        if status != 200 or not text:
            raise SourceUnavailable(
                f"{self._base_url}/latest/api/token: HTTP {status}; is the metadata service enabled, version 2?"
            )
        self._token, self._token_until = text, asked + REFRESH_AT * TOKEN_TTL_S
        return self._token

    async def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            self._session = aiohttp.ClientSession(timeout=timeout, trust_env=False)
        url = self._base_url + path
        try:
            async with self._session.request(method, url, headers=headers, allow_redirects=False) as response:
                body = await response.content.read(_MAX_BODY)
                return response.status, body.decode("utf-8", "replace").strip()
        except TimeoutError as error:
            raise SourceUnavailable(
                f"{method} {url}: no answer in {self._timeout_s} s (in a container the hop limit must be at least 2)"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise SourceUnavailable(f"{method} {url}: {error!r}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> ImdsClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
