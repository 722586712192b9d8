"""Token ids that the chat template puts between a sampled turn and the next one.

Sampled ids are never re-tokenized from text, so the template must be append-only: no message may change the text before
it.
"""

import itertools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

from rl_core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

QUESTION = "sentinelquestion"
REASONING = "sentinelreasoning"
ANSWER = "sentinelanswer"
# Detects templates that drop the reasoning of earlier turns.
TURN = {"role": "assistant", "content": f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"}
OPENING = [{"role": "user", "content": QUESTION}, TURN]
CUT = "\n[… {} tokens cut …]\n"
SHOWN = 40
"""Number of characters that an error shows on each side of a difference."""


class ChatTemplate:
    """A tokenizer's chat template, used only for appending messages."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        tools: list[dict[str, Any]],
        kinds: Collection[str],
        stop_token_ids: Collection[int],
    ) -> None:
        """`tools` are OpenAI tool schemas; `kinds` are the roles that will be appended.

        Without such roles nothing is checked. Raises InputError, with the first difference, if the template rejects or
        omits a message of one of these roles, or changes the text before it.
        """
        self._tokenizer, self._tools = tokenizer, cast(Any, tools or None)
        self._stop_token_ids, self._opening = stop_token_ids, ""
        if kinds:  # otherwise nothing is appended, and the template may change earlier turns
            self._open()
            self._check(kinds)

    def _open(self) -> None:
        text = self._render(OPENING, "assistant", starts_turn=False)
        for part in QUESTION, REASONING, ANSWER:
            self._require(part in text, f"{part!r} is omitted", "assistant")
        self._opening = _from(QUESTION, text)
        closing = self._ids(_after_answer(self._opening))
        # Index of the stop token with which the template closes a turn; None if it closes turns without one.
        self._end = next((i for i, token in enumerate(closing) if token in self._stop_token_ids), None)

    def appended_ids(self, messages: list[Message], last_id: int) -> list[int]:
        """Token ids after a sampled turn that ended with `last_id`: the rest of its closing, the messages and the start
        of the next turn.

        They include the template's end token if a different one was sampled. Raises InputError if the template rejects
        the messages.
        """
        if not self._opening:
            self._open()
        ids = self._ids(self._suffix(messages))
        if self._end is None:
            return ids
        return ids[self._end + (ids[self._end] == last_id) :]

    def cut(self, text: str, max_tokens: int) -> str:
        """The text; if longer than `max_tokens` tokens, its beginning and end with a note in between.

        If the note does not fit, only the beginning.
        """
        text = _clean(text)
        spans = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = spans["offset_mapping"]
        if len(spans) <= max_tokens:
            return text
        keep = max_tokens - len(self._ids(CUT.format(len(spans))))
        while keep >= 2:
            # Cut at the boundaries of removed tokens, so that a multi-token character is kept or removed as a whole.
            front, back = text[: spans[(keep + 1) // 2][0]], text[spans[-(keep // 2) - 1][1] :]
            shorter = front + CUT.format(len(spans) - keep) + back
            excess = len(self._ids(shorter)) - max_tokens
            if excess <= 0:
                return shorter
            keep -= excess
        return text[: spans[max_tokens][0]]

    def _suffix(self, messages: list[Message]) -> str:
        role = messages[-1]["role"]
        # Text before the first question may contain the current date.
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
                self._require(message["content"] in longer, f"{message['content']!r} is omitted", role)
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
        except Exception as error:  # templates are programs and can raise anything
            raise self._error(f"{type(error).__name__}: {error}", role) from error
        return str(text)

    def _require(self, condition: bool, problem: str, role: str) -> None:
        if not condition:
            raise self._error(problem, role)

    def _require_start(self, start: str, text: str, role: str) -> None:
        if text.startswith(start):
            return
        at = next((i for i, (a, b) in enumerate(zip(start, text, strict=False)) if a != b), len(text))
        excerpt = slice(max(at - SHOWN, 0), at + SHOWN)
        raise self._error(f"text before it changes from {start[excerpt]!r} to {text[excerpt]!r}", role)

    def _error(self, seen: str, role: str) -> InputError:
        return InputError(
            "a chat template that accepts this role and does not change the text before a message",
            f"after a message of role {role}: {seen}",
            f"chat template of {self._tokenizer.name_or_path or 'the tokenizer'}, role {role}",
            "set model.chat_template=FILE or chatml: an append-only template, which always renders every message in "
            "full, including its reasoning",
        )

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(_clean(text), add_special_tokens=False, verbose=False)["input_ids"])


def _from(mark: str, text: str) -> str:
    return "".join(text.partition(mark)[1:])


def _after_answer(text: str) -> str:
    return text[text.index(ANSWER) + len(ANSWER) :]


def _clean(text: str) -> str:
    """The text with lone surrogates replaced, which tokenizers reject."""
    return text.encode("utf-8", "replace").decode("utf-8")
