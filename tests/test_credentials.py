"""Credentials are recognised by place and by format, and ordinary text is left alone."""

import random
import string

import pytest

from rl_core.credentials import command_holds_credentials, holds_credentials, without_credentials

ANY = random.Random(0)


def some(length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(ANY.choices(alphabet, k=length))


HEX = some(40, "0123456789abcdef")
JWT = f"eyJ{some(17)}.eyJ{some(40)}.{some(43)}"
SECRETS = [
    f"ghp_{some(36)}", f"gho_{some(36)}", f"github_pat_{some(22)}_{some(59)}", f"glpat-{some(20)}", f"hf_{some(34)}",
    f"sk-{some(48)}", f"sk-proj-{some(60)}", f"sk-ant-api03-{some(90)}", f"xoxb-{some(11, '123')}-{some(24)}", JWT,
    f"AKIA{some(16, string.ascii_uppercase)}", f"wandb_v1_{some(40)}", f"local-{HEX}", f"AIza{some(35)}",
    f"npm_{some(36)}",
]  # fmt: skip
PLACES = {
    "a URL with a password": "postgresql://me:{}@db/x",
    "a password with a slash": "postgresql://me:a/{}@db",
    "a password with marks": "amqp://me:a?#{}@mq:5672/x",
    "digits and a slash": "postgresql://me:123/{}@db",
    "a password in https": "https://me:a/{}@host/x",
    **{f"?{name}": f"https://host/x?a=1&{name}={{}}" for name in ("code", "pwd", "pat", "jwt", "auth", "session_id")},
    "a fragment": "https://host/cb#access_token={}&state=1",
    "Slack": "https://hooks.slack.com/services/{}",
    "Zapier": "https://hooks.zapier.com/hooks/catch/{}",
    "Telegram": "https://api.telegram.org/bot1234567:{}/send",
    "authorization": "Authorization: Bearer {}",
    "a dict of headers": "{{'authorization': 'Basic {}'}}",
    "bearer": "error: bearer {} has expired",
    "cookie": "Cookie: session={}; theme=dark",
    "set-cookie": "Set-Cookie: id={}",
    "a key in a header": "X-Api-Key: {}",
}


@pytest.mark.parametrize("secret", SECRETS, ids=lambda secret: secret[:6])
@pytest.mark.parametrize("text", ["{}", "key {}.", "env A={} words", "https://host/{}/x", "['{}']", "a:{},b"])
def test_a_secret_of_a_known_format_is_recognised_anywhere(secret: str, text: str) -> None:
    shown = without_credentials(text.format(secret))
    assert secret not in shown and "***" in shown
    assert holds_credentials({"a": [text.format(secret)]}) and holds_credentials({text.format(secret): 1})


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_recognised_by_its_place(place: str) -> None:
    secret = "hunter2Zq7hunter2"
    shown = without_credentials(PLACES[place].format(secret))
    assert secret not in shown and "***" in shown


def test_a_secret_key_near_its_id_goes_with_it() -> None:
    key = some(20) + "/" + some(19)
    text = f"aws_access_key_id = AKIA{some(16, string.ascii_uppercase)}\naws_secret = {key}\nregion = eu"
    assert without_credentials(text) == "aws_access_key_id = ***\nregion = eu"
    assert without_credentials(f"wandb login {HEX}") == "wandb login ***"


@pytest.mark.parametrize(
    "option",
    [
        "--pat X", "--auth X", "--pwd X", "--passphrase X", "--credentials X", "-k X", "--pat=X", "--jwt X",
        "-u a:X", "--user a:X", "--api-key X", "GITHUB_PAT=X", "MYSQL_PWD=X", "--header 'Cookie: a=X'",
    ],
)  # fmt: skip
def test_an_option_with_a_secret_is_recognised(option: str) -> None:
    command = f"curl {option.replace('X', 'hunter2Zq7')} https://host/mcp"
    assert command_holds_credentials(command) or holds_credentials(command)
    variable = f"curl {option.replace('X', '$WORD')} https://host/mcp"
    assert not command_holds_credentials(variable) and not holds_credentials(variable)


@pytest.mark.parametrize(
    "text",
    [
        HEX, f"commit {HEX}", f"sha256:{HEX}{HEX[:24]}", f"git+https://github.com/a/b@{HEX}", f"rollforward-{HEX}-x",
        "sk-learn-classification-of-many-things", "task-with-a-long-name-of-thirty-letters", "disk-usage-1234567890",
        "hf_transfer", "hf_hub_download_with_a_long_name", "wandb: run demo-7b49dd4a", "eyJ", "xoxo-love-and-kisses",
        "http://host:5000/a@b?max_tokens=5&steps=3", "me@host", "sqlite:////home/a@b/mlflow.db", "s3://bucket/a:b@c",
        "abfs://container@account.dfs.core.windows.net/rows", "sftp://me@host/rows", "http://[::1]:5000/a@b",
        "Score: 1. The bearer of news", "authorization: required", "the cookie: a biscuit", "https://host/#section=3",
        "data.path=rows.parquet?steps=4", "AKIA", "bearer token", "key: value", "He said: pass=the salt",
        "x = 3 ; y = 4", "learn_copy-1a2b3c4d", "step_000012/actor/__0_0.distcp", "demo;session=", "basic auth",
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert without_credentials(text) == text and not holds_credentials(text)


@pytest.mark.parametrize(
    "command",
    [
        "curl -k https://host/mcp", "docker run -u 1000:1000 image", "words --auth basic", "env PWD=/home/me words",
        "words --credentials ./me.json", "uvx --path x words --pattern y", "pytest -k a", "words --patience 30",
        "words --user me", f"pip install git+https://github.com/a/b@{HEX}", "words --author me",
    ],
)  # fmt: skip
def test_ordinary_options_are_left_alone(command: str) -> None:
    assert not command_holds_credentials(command) and not holds_credentials(command)


def test_long_text_takes_linear_time() -> None:
    for text in (
        "eyJ" * 50_000,
        "a:" * 50_000,
        "://" * 50_000,
        "AKIA" + "A" * 200_000,
        "bearer " * 20_000,
        "-k " * 50_000,
    ):
        without_credentials(text)
        command_holds_credentials(text)
