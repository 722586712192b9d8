"""A language model behind an OpenAI-compatible server as the judge of responses."""

import asyncio
import json
import math
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import urllib3
from urllib3.exceptions import MaxRetryError, ReadTimeoutError
from urllib3.util import Retry

from rl_core.config.reward import JudgeConfig
from rl_core.errors import InputError
from rl_core.rewards.scorers import Row, truth_of
from rl_core.rewards.worker import RewardResult, Status, failure

JUDGE = "judge"
"""Name of the scorer."""
BUSY = (408, 429, 500, 502, 503, 504)
MAX_WAIT_S = 30.0
"""Longest pause between two tries, whatever the server asks for."""
_PLACEHOLDER = re.compile(r"\{(prompt|response|ground_truth)\}")


def check_judge(config: JudgeConfig) -> None:
    """Raises InputError when the judge has no address, or no key where one is named."""
    if not config.url:
        fix = "set reward.judge.url and reward.judge.model"
        raise InputError("the address of a judge, as a scorer is `judge`", "none", "reward.judge.url", fix)
    if urllib3.util.parse_url(config.url).auth:
        fix = "put the key into an environment variable and give its name as reward.judge.key_env"
        raise InputError("an address without user and password", "one with them", "reward.judge.url", fix)
    if config.key_env and not os.environ.get(config.key_env):
        # What was given is not shown: it may be the key itself.
        fix = "export the variable, or unset reward.judge.key_env"
        raise InputError("the name of an environment variable that is set", "none", "reward.judge.key_env", fix)


class Judge:
    """Asks the judge about responses, `requests` at a time; close it after use."""

    def __init__(self, config: JudgeConfig) -> None:
        """Raises InputError as `check_judge` does."""
        check_judge(config)
        self.config = config
        self._key = os.environ[config.key_env] if config.key_env else ""
        self._headers = {"Content-Type": "application/json"}
        if self._key:
            self._headers["Authorization"] = f"Bearer {self._key}"
        self._http = urllib3.PoolManager(maxsize=config.requests)
        self._threads = ThreadPoolExecutor(config.requests, "judge")
        self._free = asyncio.Semaphore(config.requests)

    def close(self) -> None:
        """Ask nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def score(self, response: str, row: Row) -> RewardResult:
        """What the judge says of a response, within a bounded time from when it is asked."""
        patience = (self.config.retries + 1) * (self.config.timeout_s + MAX_WAIT_S)
        async with self._free:
            begun = time.monotonic()
            asked = asyncio.get_running_loop().run_in_executor(self._threads, self._judged, response, row)
            try:
                result = await asyncio.wait_for(asked, patience)
            except TimeoutError:
                result = failure("timeout", f"the judge did not finish within {patience:.0f} s")
        return replace(result, seconds=time.monotonic() - begun)

    def _judged(self, response: str, row: Row) -> RewardResult:
        try:
            score = self._score(self._answer(self._question(response, row)))
        except Exception as error:  # a server may answer anything; it concerns this response only
            last = error.reason if isinstance(error, MaxRetryError) else error
            status: Status = "timeout" if isinstance(last, ReadTimeoutError) else "error"
            return failure(status, self._without_key(f"judge: {type(last).__name__}: {last}"))
        if not math.isfinite(score):
            return failure("non_finite", f"the judge's score is {score}")
        return RewardResult(score, "ok")

    def _question(self, response: str, row: Row) -> str:
        messages = row["prompt"]
        texts = [message["content"] for message in messages]
        prompt = texts[0] if len(texts) == 1 else "\n".join(f"{m['role']}: {m['content']}" for m in messages)
        parts = {"prompt": prompt, "response": response, "ground_truth": truth_of(row)}
        # All at once: what looks like a place within a response stays as it is.
        return _PLACEHOLDER.sub(lambda match: parts[match[1]], self.config.prompt)

    def _answer(self, question: str) -> str:
        body = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": question.encode("utf-8", "replace").decode()}],
            "temperature": 0,
        }
        reply = self._http.request(
            "POST",
            f"{(self.config.url or '').rstrip('/')}/chat/completions",
            body=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"}
            | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=self.config.timeout_s,
            retries=_Retry(
                total=self.config.retries,
                status_forcelist=BUSY,
                allowed_methods=None,
                backoff_factor=0.5,
                backoff_max=MAX_WAIT_S,
                raise_on_status=False,
            ),
            redirect=False,  # the key is for this address alone
        )
        if reply.status != 200:
            raise ValueError(f"HTTP status {reply.status}: {reply.data[:500].decode('utf-8', 'replace')}")
        text = json.loads(reply.data)["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise ValueError(f"the answer's content is {type(text).__name__}")
        return text

    def _score(self, text: str) -> float:
        if self.config.score_field is None:
            found = list(re.finditer(self.config.score_pattern, text))
            if not found:
                raise ValueError(f"no score that reward.judge.score_pattern matches in: {text[-500:]}")
            return float(found[-1][1])
        try:
            value: Any = json.loads(text[text.index("{") : text.rindex("}") + 1])[self.config.score_field]
        except (ValueError, KeyError):
            raise ValueError(f"no JSON object with `{self.config.score_field}` in: {text[-500:]}") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"`{self.config.score_field}` is no number in: {text[-500:]}")
        return float(value)

    def _without_key(self, text: str) -> str:
        # Servers repeat a key that they refuse.
        return text.replace(self._key, "***") if self._key else text


class _Retry(Retry):
    """Waits no longer than MAX_WAIT_S, whatever the server asks for."""

    def get_retry_after(self, response: Any) -> float | None:
        """Seconds that the server asks to wait."""
        asked = super().get_retry_after(response)
        return None if asked is None else min(asked, MAX_WAIT_S)
