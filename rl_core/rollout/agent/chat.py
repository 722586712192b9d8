"""What the chat template writes between a sampled turn and the next one, as token ids to append.

Sampled ids are never made from text again, so the template must only ever append: no message may change what comes
before it.
"""

import itertools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

import jinja2

from rl_core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

QUESTION = "sentinelquestion"
REASONING = "sentinelreasoning"
ANSWER = "sentinelanswer"
# Templates that drop the reasoning of earlier turns are found by it.
TURN = {"role": "assistant", "content": f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"}
OPENING = [{"role": "user", "content": QUESTION}, TURN]
CUT = "\n[… {} tokens cut …]\n"
SHOWN = 40
"""Characters that an error shows around a difference."""


class ChatTemplate:
    """A tokenizer's chat template, used only to append."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        tools: list[dict[str, Any]],
        kinds: Collection[str],
        stop_token_ids: Collection[int],
    ) -> None:
        """`tools` are OpenAI tool schemas; `kinds` are the roles that will be appended.

        Raises InputError, with the first difference, when a message of one of these roles is refused, left out, or
        changes the text before it.
        """
        self._tokenizer, self._tools = tokenizer, cast(Any, tools or None)
        text = self._render(OPENING, "assistant", starts_turn=False)
        for part in QUESTION, REASONING, ANSWER:
            self._require(part in text, f"{part!r} is left out", "assistant")
        self._opening = _from(QUESTION, text)
        self._check(kinds)
        closing = self._ids(_after_answer(self._opening))
        # The stop token with which the template closes a turn; a template may have none.
        self._end = next((i for i, token in enumerate(closing) if token in stop_token_ids), None)

    def appended_ids(self, messages: list[Message], last_id: int) -> list[int]:
        """Token ids that come after a sampled turn that ended in `last_id`: the rest of its closing, the messages and
        the start of the next turn.

        The template's own end token is among them when another one was sampled. Raises InputError when the template
        refuses the messages.
        """
        ids = self._ids(self._suffix(messages))
        if self._end is None:
            return ids
        return ids[self._end + (ids[self._end] == last_id) :]

    def cut(self, text: str, max_tokens: int) -> str:
        """The text, or when it is longer than `max_tokens` tokens its beginning and end with a note between.

        Where there is no room for the note it is the beginning alone.
        """
        text = _clean(text)
        spans = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = spans["offset_mapping"]
        if len(spans) <= max_tokens:
            return text
        keep = max_tokens - len(self._ids(CUT.format(len(spans))))
        while keep >= 2:
            # Bounded by tokens that go: a character of several tokens stays or goes as a whole.
            front, back = text[: spans[(keep + 1) // 2][0]], text[spans[-(keep // 2) - 1][1] :]
            shorter = front + CUT.format(len(spans) - keep) + back
            excess = len(self._ids(shorter)) - max_tokens
            if excess <= 0:
                return shorter
            keep -= excess
        return text[: spans[max_tokens][0]]

    def _suffix(self, messages: list[Message]) -> str:
        role = messages[-1]["role"]
        # What comes before the first question may change with the day.
        text = _from(QUESTION, self._render([*OPENING, *messages], role, starts_turn=True))
        self._require_start(self._opening, text, role)
        return _after_answer(text)

    def _check(self, kinds: Collection[str]) -> None:
        for roles in itertools.product(sorted(kinds), repeat=2):
            talk: list[Message] = list(OPENING)
            text = self._render(talk, "assistant", starts_turn=False)
            for number, role in enumerate(roles):
                message = {"role": role, "content": f"sentinel{role}{number}"}
                talk.append(message)
                longer = self._render(talk, role, starts_turn=True)
                self._require(message["content"] in longer, f"{message['content']!r} is left out", role)
                before = text[: text.rindex(ANSWER) + len(ANSWER)]
                self._require_start(before + self._suffix([message]), longer, role)
                talk.append(TURN)
                text = self._render(talk, role, starts_turn=False)
                self._require_start(longer, text, role)

    def _render(self, messages: list[Message], role: str, starts_turn: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=self._tools,
                tokenize=False,
                add_generation_prompt=starts_turn,
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise self._error(f"{type(error).__name__}: {error}", role) from error
        return str(text)

    def _require(self, holds: bool, otherwise: str, role: str) -> None:
        if not holds:
            raise self._error(otherwise, role)

    def _require_start(self, start: str, text: str, role: str) -> None:
        if text.startswith(start):
            return
        at = next((i for i, (a, b) in enumerate(zip(start, text, strict=False)) if a != b), len(text))
        where = slice(max(at - SHOWN, 0), at + SHOWN)
        raise self._error(f"text before it changes from {start[where]!r} to {text[where]!r}", role)

    def _error(self, seen: str, role: str) -> InputError:
        return InputError(
            "a chat template that takes this role and leaves what comes before a message as it is",
            f"after a message of role {role}: {seen}",
            f"chat template of {self._tokenizer.name_or_path or 'the tokenizer'}, role {role}",
            "put an append-only template as chat_template.jinja beside the tokenizer's files: one that writes every "
            "message whole, reasoning included, whatever comes after it",
        )

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(_clean(text), add_special_tokens=False, verbose=False)["input_ids"])


def _from(mark: str, text: str) -> str:
    return "".join(text.partition(mark)[1:])


def _after_answer(text: str) -> str:
    return text[text.index(ANSWER) + len(ANSWER) :]


def _clean(text: str) -> str:
    """The text without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
