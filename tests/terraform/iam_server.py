"""moto's S3, STS and IAM with the policies enforced. ``python -m tests.terraform.iam_server PORT``.

moto takes a condition that it cannot evaluate for a denial, and knows those of trust policies alone. Here a condition
on a request is evaluated as IAM does, for the keys and operators that the modules use:
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_condition.html
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

from flask import request
from moto.iam import access_control
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

_is_permitted = access_control.IAMPolicyStatement.is_action_permitted


def _keys_of_the_request() -> dict[str, str]:
    keys = {}
    if (prefix := request.args.get("prefix")) is not None:
        keys["s3:prefix"] = prefix
    if (condition := request.headers.get("If-None-Match")) is not None:
        keys["s3:if-none-match"] = condition
    return keys


def _like(pattern: str, value: str) -> bool:
    words = (re.escape(word) for word in re.split(r"([*?])", pattern))
    return re.fullmatch("".join({r"\*": ".*", r"\?": "."}.get(word, word) for word in words), value) is not None


def holds(conditions: dict[str, dict[str, str | list[str]]], keys: dict[str, str]) -> bool:
    """Return True if a statement with these conditions is about a request with these keys."""
    for operator, expected in conditions.items():
        for key, expected_values in expected.items():
            values = [expected_values] if isinstance(expected_values, str) else expected_values
            if operator != "StringLike":
                raise NotImplementedError(operator)
            if key not in keys or not any(_like(value, keys[key]) for value in values):
                return False
    return True


def _with_conditions(self: Any, action: str, resource: str = "*", *rest: Any, **more: Any) -> Any:
    statement = self._statement
    if "Condition" in statement and "Resource" in statement:
        if not holds(statement["Condition"], _keys_of_the_request()):
            return access_control.PermissionResult.NEUTRAL
        self._statement = {name: value for name, value in statement.items() if name != "Condition"}
    return _is_permitted(self, action, resource, *rest, **more)


if __name__ == "__main__":
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    access_control.IAMPolicyStatement.is_action_permitted = _with_conditions  # type: ignore[method-assign]
    application = DomainDispatcherApplication(create_backend_app)
    make_server("127.0.0.1", int(sys.argv[1]), application, threaded=True).serve_forever()
