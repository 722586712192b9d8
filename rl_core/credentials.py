"""Detects and removes credentials in text: settings must not contain any, and nothing that is displayed or stored
shows them.

Credentials are recognised by their place (in a URL, a header, an option) and by their format, whatever stands before
them. A variable such as $PASSWORD is not a secret. Text without such marks is left alone: a git hash or a run name is
not a secret.
"""

import re
from typing import Any

_VARIABLE = r"\$(?:\w+|\{\w+\})"

# The part before `@host`. A name without a password counts only in http(s) URLs: elsewhere it is the container of
# abfs://container@account or the user of sftp://user@host. A password may contain / ? and #; in http(s) URLs digits
# after the colon are a port.
_USER = re.compile(
    r"(?i)(?:(?<=http://)|(?<=https://)|(?<=://)(?=[^\s/?#\"]*:[^\s/?#\"]*@))"
    rf"(?!(?:[^\s/?#@:]*:)?{_VARIABLE}@)[^\s/?#\"]+@"
    rf"|(?<=://)(?![^\s:]+:{_VARIABLE}@)(?:(?<!http://)(?<!https://)[^\s/?#\"'@:\[]+:"
    r"|[^\s/?#\"'@:\[]+:(?!\d{1,5}[/?#]))[^\s\"'@]*@"
)
_SECRET = (
    r"[\w.-]*(?:token|passw(?:or)?d|passphrase|(?<![a-z])(?:pass|pat|pwd|jwt)|secret|"
    r"(?:(?<![a-z])|api|access|secret|private|account)key|credential|signature)"
)
"""Names of options and variables that hold secrets."""
_IN_QUERY = rf"{_SECRET}|{_SECRET}id|sig|code|sid|session(?:_?id)?|ticket|otp|(?:[\w.-]*[._-])?auth(?:orization)?"
_QUERY = re.compile(rf"(?i)([?&#;](?:{_IN_QUERY})=)(?!\$|(?:true|false|none|[01])(?![^&#]))[^\s&#\"']+")
_HEADER = re.compile(
    r"(?i)((?:authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|digest|token|negotiate)|\bbearer)\s+)"
    r"(?!\$)[\w.~+/=-]{8,}"
    r"|(cookie['\"]?\s*:\s*['\"]?)(?![^=]*=\s*\$)[\w.-]+=[^\s'\"][^'\"\n]*"
    r"|((?:x-)?(?:api|auth|access)-(?:key|token)['\"]?\s*:\s*['\"]?)(?!\$)[^\s'\",}]{8,}"
)
_PLACES = re.compile(
    r"(?i)((?:hooks\.slack\.com/services|hooks\.zapier\.com/hooks/catch|discord(?:app)?\.com/api/webhooks)/)"
    r"[\w/-]{12,}|(/bot\d{6,}:)[\w-]{16,}|(\bwandb\b.{0,40}?(?<!\w))[0-9a-f]{40}(?!\w)"
)
"""Addresses that are secrets themselves, and keys that only their surroundings tell from a hash."""
_FORMATS = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|glpat-[\w-]{20,}"
    r"|hf_[A-Za-z0-9]{30,}"
    r"|sk-[A-Za-z0-9]{20,}|sk-(?:proj|ant|svcacct|admin|or|lf)-[\w-]{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])(?:.{0,80}?(?<![A-Za-z0-9/+])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+]))?"
    r"|AIza[\w-]{35}|ya29\.[\w-]{20,}"
    r"|xox[abeoprs]-(?=[\w-]*\d)[\w-]{10,}"
    r"|(?:wandb_v\d+_\w{20,}|local-[0-9a-f]{40})"
    r"|[rs]k_(?:live|test)_\w{16,}|npm_[A-Za-z0-9]{36}|pypi-AgE[\w-]{50,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"
    r")|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?",
    re.DOTALL,
)
"""GitHub, GitLab, Hugging Face, OpenAI and the like, AWS (with a secret near the id), Google, Slack, W&B, Stripe, npm,
PyPI, JSON web tokens and private keys."""
_OPTION = re.compile(
    rf"(?i)(?:--?{_SECRET}[=\s]\s*|(?<![\w./-]){_SECRET}\s*(?:=|:(?!/))\s*|"
    r"(?<![\w./-])[\w.-]*authorization\s*[=:]\s*['\"]?+(?:[\w-]+\s+)?+|\bbearer\s+)['\"]?(?![\s$'\"])(?!(?<=pwd=)/)"
    r"|--?auth(?:entication)?[=\s]\s*['\"]?(?!(?:none|basic|digest|bearer|token|oauth2?|true|false)\b)[^\s$'\"-]"
    r"|--?credentials[=\s]\s*['\"]?(?![/.~])[^\s$'\"-]"
    r"|(?<!\S)-k[=\s]\s*['\"]?(?!\w+://)[^\s$'\"/.-]{6,}"
    r"|(?<!\S)(?:-u|--user|--proxy-user)[=\s]\s*['\"]?(?!\d+:\d+\b)[^\s:$'\"]*:(?![$/])[^\s'\"]"
)

CREDENTIALS_FIX = (
    "remove the credentials and export them as environment variables; docs/reliability.md, Secrets, lists the names"
)
"""The `fix` of errors about credentials."""


def without_credentials(text: str) -> str:
    """The text with credentials replaced by `***`: in URLs, in headers, and those of a known format."""
    text = _QUERY.sub(r"\1***", _USER.sub("***@", text))
    for pattern in (_HEADER, _PLACES):
        text = pattern.sub(lambda match: f"{match[match.lastindex or 0]}***", text)
    return _FORMATS.sub("***", text)


def holds_credentials(value: Any) -> bool:
    """Whether a string, or any string within lists and mappings, contains credentials."""
    if isinstance(value, str):
        return without_credentials(value) != value
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return isinstance(parts, list | tuple) and any(map(holds_credentials, parts))


def command_holds_credentials(command: str) -> bool:
    """Whether a command line contains a token, password or key as `--token X`, `API_KEY=X` or `-u name:password`; a
    variable `$X` does not count."""
    return _OPTION.search(command) is not None
