"""Clauses about calls that the store does not allow."""
# ruff: noqa: S101
# (these are tests)

from __future__ import annotations

import functools

from cloudckpt.errors import AccessDeniedError, CredentialsError
from cloudckpt.stores.base import Store
from cloudckpt.testing._contract_base import Clauses
from cloudckpt.testing._contract_calls import calls_of, outcome_of
from cloudckpt.testing._contract_tools import content, keys, put

# Credentials may be good for reading alone, and some stores begin an upload without asking anybody.
_MAY_SUCCEED = ("create_multipart", "head", "list", "list_directories", "list_uploads", "read", "read_into")


class DeniedClauses(Clauses):
    """Part of `cloudckpt.testing.StoreContract`. They need `denied`."""

    def test_a_denied_call_says_so(self, store: Store) -> None:
        """No second try helps, and nobody must look for a network fault: the error says what is not allowed, and
        where.
        """
        denied = self.denied(store)
        if denied is None:
            self.does_not_apply("nobody is denied anything here")
            return
        calls = calls_of(store)
        before = {key: content(store, key) for key in keys(store)}
        outcomes = {name: outcome_of(functools.partial(call.run, denied)) for name, call in calls.items()}
        refused = {
            name: outcome
            for name, outcome in outcomes.items()
            if name not in _MAY_SUCCEED or isinstance(outcome, Exception)
        }
        for name, outcome in refused.items():
            assert isinstance(outcome, AccessDeniedError | CredentialsError), (name, outcome)
            url = store.url(calls[name].key).rstrip("/")
            assert outcome.key.startswith(url), name
            assert url in str(outcome), name
        assert {key: content(store, key) for key in keys(store)} == before

    def test_a_denied_create_is_no_lost_race(self, store: Store) -> None:
        """Taken for “exists already” it would send the user after a checkpoint that is not there."""
        denied = self.denied(store)
        if denied is None:
            self.does_not_apply("nobody is denied anything here")
            return
        if self.lacks_create(store):
            return
        outcome = outcome_of(lambda: put(denied, "manifest", b"body", if_absent=True))
        assert isinstance(outcome, AccessDeniedError | CredentialsError), outcome
        assert "manifest" not in keys(store)
