"""Judge: scores responses with a language model behind an OpenAI-compatible server."""

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
"""HTTP status codes that are retried."""
MAX_WAIT_S = 30.0
"""Longest pause between two attempts, even if the server requests a longer one."""
_PLACEHOLDER = re.compile(r"\{(prompt|response|ground_truth)\}")


def check_judge(config: JudgeConfig) -> None:
    """Raises InputError if the judge's URL is missing or has credentials, or if the named key variable is not set."""
    if not config.url:
        fix = "set reward.judge.url and reward.judge.model"
        raise InputError("a URL for the scorer `judge`", "none", "reward.judge.url", fix)
    if urllib3.util.parse_url(config.url).auth:
        fix = "put the key into an environment variable and set reward.judge.key_env to its name"
        raise InputError("a URL without credentials", "a URL with credentials", "reward.judge.url", fix)
    if config.key_env and not os.environ.get(config.key_env):
        # The value is not shown: it may be the key itself.
        fix = "export the variable, or unset reward.judge.key_env"
        seen = "a variable that is not set"
        raise InputError("the name of a set environment variable", seen, "reward.judge.key_env", fix)


class Judge:
    """Client of the judge with up to `requests` concurrent requests; close it after use."""

    def __init__(self, config: JudgeConfig) -> None:
        """Raises the InputErrors of `check_judge`."""
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
        """Cancels queued requests."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def score(self, response: str, row: Row) -> RewardResult:
        """The judge's result for a response; the time from sending the request is bounded."""
        limit_s = (self.config.retries + 1) * (self.config.timeout_s + MAX_WAIT_S)
        async with self._free:
            begin = time.monotonic()
            request = asyncio.get_running_loop().run_in_executor(self._threads, self._judged, response, row)
            try:
                result = await asyncio.wait_for(request, limit_s)
            except TimeoutError:
                result = failure("timeout", f"the judge did not finish within {limit_s:.0f} s")
        return replace(result, seconds=time.monotonic() - begin)

    def _judged(self, response: str, row: Row) -> RewardResult:
        try:
            score = self._score(self._answer(self._question(response, row)))
        except Exception as error:  # a server may reply anything; an error affects this response only
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
        # One substitution pass: text in a response that looks like a placeholder stays as it is.
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
            redirect=False,  # the key must not be sent to another host
        )
        if reply.status != 200:
            raise ValueError(f"HTTP status {reply.status}: {reply.data[:500].decode('utf-8', 'replace')}")
        text = json.loads(reply.data)["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise ValueError(f"expected a string as message content, got {type(text).__name__}")
        return text

    def _score(self, text: str) -> float:
        if self.config.score_field is None:
            found = list(re.finditer(self.config.score_pattern, text))
            if not found:
                raise ValueError(f"no match of reward.judge.score_pattern in: {text[-500:]}")
            return float(found[-1][1])
        try:
            value: Any = json.loads(text[text.index("{") : text.rindex("}") + 1])[self.config.score_field]
        except (ValueError, KeyError):
            raise ValueError(f"no JSON object with `{self.config.score_field}` in: {text[-500:]}") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"`{self.config.score_field}` is not a number in: {text[-500:]}")
        return float(value)

    def _without_key(self, text: str) -> str:
        # Servers may echo a rejected key in their error message.
        return text.replace(self._key, "***") if self._key else text


class _Retry(Retry):
    """Retry that waits at most MAX_WAIT_S, even if the server requests a longer pause."""

    def get_retry_after(self, response: Any) -> float | None:
        """Pause in seconds requested by the server, at most MAX_WAIT_S."""
        requested = super().get_retry_after(response)
        return None if requested is None else min(requested, MAX_WAIT_S)
