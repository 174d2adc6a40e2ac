"""The sources of AWS credentials: their names, and which of them is busy rather than absent."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

SOURCES: Mapping[str | None, str] = {
    "assume-role": "a role of the profile",
    "assume-role-with-web-identity": "a web identity's role",
    "config-file": "the AWS config file",
    "container-role": "the container's credentials endpoint",
    "custom-process": "the profile's credential_process",
    "env": "the environment (AWS_ACCESS_KEY_ID)",
    "explicit": "the storage options",
    "iam-role": "the EC2 metadata service",
    "shared-credentials-file": "the shared credentials file",
    "sso": "AWS SSO",
}
"""By the names of botocore's providers."""
_FETCHERS = {"container-role": "_fetcher", "iam-role": "_role_fetcher"}
"""The providers that ask a service of the machine, and the attributes that hold the makers of their requests."""
_CLIENT_ERROR, _SERVER_ERROR, _TOO_MANY = 400, 500, 429


class MetadataServices:
    """Notes how the services answer botocore, which reports a busy one as credentials that do not exist."""

    def __init__(self) -> None:
        self._sessions: dict[str, _NotedSession] = {}

    def watch(self, core: Any) -> None:
        """From now on, note the answers that the providers of a botocore session get."""
        resolver = core.get_component("credential_provider")
        for method, name in _FETCHERS.items():
            with contextlib.suppress(AttributeError):  # a later botocore; then nothing is waited for
                fetcher = getattr(resolver.get_provider(method), name)
                self._sessions[method] = fetcher._session = _NotedSession(fetcher._session)  # noqa: SLF001  # botocore has no public way

    def problem_behind(self, error: Exception) -> str | None:
        """Return the service that was busy, and its answer, if that is why `error` says that there are no credentials.

        A machine outside EC2 has no metadata service: a connection that is refused, or never made, is no such answer.
        The address of a container's endpoint comes from its platform, so that one is expected to be there.
        """
        from botocore.exceptions import CredentialRetrievalError, NoCredentialsError, ReadTimeoutError

        if not isinstance(error, CredentialRetrievalError | NoCredentialsError):
            return None
        provider = error.kwargs.get("provider", "iam-role")
        if provider not in self._sessions:  # a role of the profile can have one of the services for its source
            provider = next((name for name, session in self._sessions.items() if session.last is not None), "")
        session = self._sessions.get(provider)
        if session is None or session.last is None:
            return None
        url, answer = session.last
        if isinstance(answer, int):
            is_busy = answer >= _SERVER_ERROR or answer == _TOO_MANY
            outcome = f"answered with status {answer}"
        else:
            # A refresh needs a role that the service has handed out before.
            is_expected = provider == "container-role" or session.has_succeeded
            is_busy = isinstance(answer, ReadTimeoutError) or is_expected
            outcome = f"did not answer ({type(answer).__name__})"
        return f"{SOURCES[provider]} at {url} {outcome}" if is_busy else None


class _NotedSession:
    """An HTTP session of botocore that notes the last answer, and whether any request succeeded."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.last: tuple[str, int | Exception] | None = None
        self.has_succeeded = False

    def send(self, request: Any) -> Any:
        try:
            response = self._session.send(request)
        except Exception as error:
            self.last = (request.url, error)
            raise
        self.last = (request.url, response.status_code)
        self.has_succeeded = self.has_succeeded or response.status_code < _CLIENT_ERROR
        return response
