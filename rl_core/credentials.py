"""Credentials within texts: settings must not hold any, and what is told of an error shows none."""

import re
from typing import Any

# What comes before `@host`. A variable such as $PASSWORD is no secret, and a name alone is one on the web only: it is
# the container of abfs://container@account, the user of sftp://user@host.
_USER = re.compile(
    r"(?i)(?:(?<=http://)|(?<=https://)|(?<=://)(?=[^\s/?#\"]*:[^\s/?#\"]*@))"
    r"(?!(?:[^\s/?#@:]*:)?\$(?:\w+|\{\w+\})@)[^\s/?#\"]+@"
)
_SECRET = (
    r"[\w.-]*(?:token|passw(?:or)?d|(?<![a-z])pass|secret|"
    r"(?:(?<![a-z])|api|access|secret|private)key|credential|signature)"
)
"""Names that secrets go by."""
_QUERY = re.compile(
    rf"(?i)([?&](?:{_SECRET}|{_SECRET}id|sig|(?:[\w.-]*[._-])?auth(?:orization)?)=)"
    r"(?!\$|(?:true|false|none|[01])(?![^&#]))[^\s&#\"']+"
)
_OPTION = re.compile(
    rf"(?i)(?:--?{_SECRET}[=\s]\s*|(?<![\w./-]){_SECRET}\s*(?:=|:(?!/))\s*|"
    r"(?<![\w./-])[\w.-]*authorization\s*[=:]\s*['\"]?+(?:[\w-]+\s+)?+|\bbearer\s+)['\"]?(?![\s$'\"])"
)

HOW = (
    "leave user, password and tokens out and export them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for storage, "
    "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD for MLflow, PREFECT_API_AUTH_STRING or PREFECT_API_KEY for "
    "Prefect, the variable that reward.judge.key_env names for a judge, and for MCP servers any that the setting names "
    "as $NAME"
)
"""What to do instead."""


def without_credentials(text: str) -> str:
    """The text with users, passwords and signatures of its URLs replaced by `***`."""
    return _QUERY.sub(r"\1***", _USER.sub("***@", text))


def holds_credentials(value: Any) -> bool:
    """Whether a text, or one within lists and mappings, has a URL with credentials."""
    if isinstance(value, str):
        return without_credentials(value) != value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(holds_credentials, parts))


def command_holds_credentials(command: str) -> bool:
    """Whether a command line has a token, password or key as `--token X` or `API_KEY=X`; a variable `$X` is none."""
    return _OPTION.search(command) is not None
