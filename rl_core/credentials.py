"""Detects and removes credentials in text: settings must not contain any, and error messages show none."""

import re
from typing import Any

# The part before `@host`. A variable such as $PASSWORD is not a secret. A name without a password counts only in
# http(s) URLs: elsewhere it is the container of abfs://container@account or the user of sftp://user@host.
_USER = re.compile(
    r"(?i)(?:(?<=http://)|(?<=https://)|(?<=://)(?=[^\s/?#\"]*:[^\s/?#\"]*@))"
    r"(?!(?:[^\s/?#@:]*:)?\$(?:\w+|\{\w+\})@)[^\s/?#\"]+@"
)
_SECRET = (
    r"[\w.-]*(?:token|passw(?:or)?d|(?<![a-z])pass|secret|"
    r"(?:(?<![a-z])|api|access|secret|private)key|credential|signature)"
)
"""Names of options and variables that hold secrets."""
_QUERY = re.compile(
    rf"(?i)([?&](?:{_SECRET}|{_SECRET}id|sig|(?:[\w.-]*[._-])?auth(?:orization)?)=)"
    r"(?!\$|(?:true|false|none|[01])(?![^&#]))[^\s&#\"']+"
)
_OPTION = re.compile(
    rf"(?i)(?:--?{_SECRET}[=\s]\s*|(?<![\w./-]){_SECRET}\s*(?:=|:(?!/))\s*|"
    r"(?<![\w./-])[\w.-]*authorization\s*[=:]\s*['\"]?+(?:[\w-]+\s+)?+|\bbearer\s+)['\"]?(?![\s$'\"])"
)

CREDENTIALS_FIX = (
    "remove the credentials and export them as environment variables; docs/reliability.md, Secrets, lists the names"
)
"""The `fix` of errors about credentials."""


def without_credentials(text: str) -> str:
    """The text with users, passwords and signatures in its URLs replaced by `***`."""
    return _QUERY.sub(r"\1***", _USER.sub("***@", text))


def holds_credentials(value: Any) -> bool:
    """Whether a string, or any string within lists and mappings, contains a URL with credentials."""
    if isinstance(value, str):
        return without_credentials(value) != value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(holds_credentials, parts))


def command_holds_credentials(command: str) -> bool:
    """Whether a command line contains a token, password or key as `--token X` or `API_KEY=X`; a variable `$X` does not
    count."""
    return _OPTION.search(command) is not None
