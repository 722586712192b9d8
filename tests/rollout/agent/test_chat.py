import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rl_core.errors import InputError
from rl_core.models.tiny import build_tokenizer
from rl_core.rollout.agent.chat import REASONING, ChatTemplate

TOOLS = "{%- if tools -%}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif -%}"
STARTS = "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
CHATML = (
    TOOLS
    + "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor -%}"
    + STARTS
)
# Tool answers share one user turn, as in many templates.
GROUPED = (
    TOOLS
    + "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    + "{%- if loop.previtem.role != 'tool' -%}<|im_start|>user{% endif -%}{{ '\n<answer>' + m.content + '</answer>' }}"
    + "{%- if loop.last or loop.nextitem.role != 'tool' -%}<|im_end|>\n{% endif -%}"
    + "{%- else -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif -%}{%- endfor -%}"
    + STARTS
)
HEADERS = (
    "<|begin|>{%- for m in messages -%}<|im_start|>{{ m.role }}<|head|>\n\n{{ m.content | trim }}<|eot|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant<|head|>\n\n{% endif -%}"
)
# The reasoning of turns before the last user message is dropped; a last turn without any gets an empty one.
THINKING = (
    TOOLS
    + "{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last -%}"
    + "{%- set ns = namespace(old=true) -%}"
    + "{%- for m in messages -%}{%- if m == last -%}{%- set ns.old = false -%}{%- endif -%}"
    + "{%- set answer = m.content.split('</think>')[-1] | trim -%}"
    + "{%- set text = answer if ns.old and m.role == 'assistant' else m.content -%}"
    + "{%- set empty = loop.last and m.role == 'assistant' and '</think>' not in m.content -%}"
    + "<|im_start|>{{ m.role }}\n{{ '<think>\n\n</think>\n\n' if empty }}{{ text }}<|im_end|>\n{% endfor -%}"
    + STARTS
)
TEMPLATES = {"chatml": CHATML, "grouped": GROUPED, "headers": HEADERS, "thinking": THINKING}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin|>", "<|head|>", "<|eot|>"]
TEXT = st.text(st.characters(exclude_categories=[]), max_size=20)


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token a byte, so that pieces of a text and the whole of it have the same tokens."""
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    begin = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
    tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[begin])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL)
    fast.chat_template, fast.name_or_path = template, "models/some"
    return fast


TOKENIZERS = {name: byte_tokenizer(template) for name, template in TEMPLATES.items()} | {"tiny": build_tokenizer()}


def stop_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return [i for token in ("<|im_end|>", "<|eot|>", "<|endoftext|>", "<|end|>")
            if (i := tokenizer.get_added_vocab().get(token)) is not None]  # fmt: skip


def chat(name: str, kinds: set[str]) -> ChatTemplate:
    return ChatTemplate(TOKENIZERS[name], [ADD], kinds, stop_ids(TOKENIZERS[name]))


CHATS = {name: chat(name, {"tool"} if name == "thinking" else {"tool", "user"}) for name in TOKENIZERS}


def ids_of(name: str, text: str) -> list[int]:
    return list(TOKENIZERS[name](text.encode("utf-8", "replace").decode(), add_special_tokens=False)["input_ids"])


def rendered(name: str, messages: list[dict[str, Any]]) -> str:
    return str(TOKENIZERS[name].apply_chat_template(messages, tools=[ADD], tokenize=False, add_generation_prompt=True))


@given(
    st.sampled_from(sorted(CHATS)), TEXT, st.lists(st.tuples(TEXT, st.lists(TEXT, min_size=1, max_size=3)), max_size=3)
)
def test_prompt_turns_and_appended_tokens_are_the_whole_conversation(
    name: str, question: str, rounds: list[tuple[str, list[str]]]
) -> None:
    talk = [{"role": "user", "content": question}]
    ids = ids_of(name, rendered(name, talk))
    for number, (answer, texts) in enumerate(rounds):
        role = "user" if number == 1 and name != "thinking" else "tool"
        messages = [{"role": role, "content": text} for text in texts]
        # A sampled turn's own white space is never rendered again.
        end = stop_ids(TOKENIZERS[name])[1 if name == "headers" else 0]
        ids += [*ids_of(name, answer.strip()), end, *CHATS[name].appended_ids(messages, end)]
        talk += [{"role": "assistant", "content": answer.strip()}, *messages]
    assert ids == ids_of(name, rendered(name, talk))


def test_the_new_line_after_the_stop_token_is_appended() -> None:
    tokenizer: Any = TOKENIZERS["chatml"]
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = CHATS["chatml"].appended_ids([{"role": "tool", "content": "4"}], stop)
    assert tokenizer.decode(ids) == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("name", "end"), [("chatml", "<|im_end|>\n"), ("headers", "<|eot|>"), ("tiny", "<|end|>")])
def test_a_turn_that_ended_in_another_token_is_closed_first(name: str, end: str) -> None:
    tokenizer: Any = TOKENIZERS[name]
    foreign = "<pad>" if name == "tiny" else "<|endoftext|>"
    own, other = tokenizer.convert_tokens_to_ids([end.strip(), foreign])
    message = [{"role": "user", "content": f"what is {foreign}?"}]
    assert CHATS[name].appended_ids(message, other) == [own, *CHATS[name].appended_ids(message, own)]
    assert ids_of(name, end) == CHATS[name].appended_ids(message, other)[: len(ids_of(name, end))]


def test_a_template_without_a_stop_token_is_appended_as_it_is() -> None:
    plain = byte_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    ids = ChatTemplate(plain, [], {"user"}, [2]).appended_ids([{"role": "user", "content": "<|im_end|>"}], 2)
    assert plain.decode(ids) == "\nuser: <|im_end|>\n"


def test_the_template_sees_the_tools() -> None:
    tokenizer = byte_tokenizer(CHATML + "{{ raise_exception('which tools?') if not tools }}")
    ChatTemplate(tokenizer, [ADD], {"tool"}, stop_ids(tokenizer))
    with pytest.raises(InputError, match="which tools?"):
        ChatTemplate(tokenizer, [], {"tool"}, stop_ids(tokenizer))


def test_what_a_template_writes_before_the_question_may_change_later() -> None:
    tokenizer = byte_tokenizer(CHATML)
    template = ChatTemplate(tokenizer, [], {"user"}, stop_ids(tokenizer))
    before = template.appended_ids([{"role": "user", "content": "4"}], 0)
    tokenizer.chat_template = "Today is Tuesday.\n" + CHATML
    assert template.appended_ids([{"role": "user", "content": "4"}], 0) == before


@pytest.mark.parametrize(
    ("template", "kinds", "says"),
    [
        (THINKING, {"user"},
         ["role user", "text before it changes", "<think>", "models/some", "model.chat_template=FILE"]),
        (THINKING, {"tool", "user"}, ["role user", "text before it changes"]),
        (CHATML + "{{ raise_exception('no tools here') if 'tool' in messages | map(attribute='role') }}", {"tool"},
         ["role tool", "TemplateError: no tools here"]),
        (CHATML.replace("for m in messages", "for m in messages if m.role != 'tool'"), {"tool"},
         ["role tool", "'sentineltool0' is omitted"]),
        (CHATML.replace("m.content | trim", "m.content.split('</think>')[-1]"), {"user"},
         ["role assistant", "'sentinelreasoning' is omitted"]),
        ("{{ messages | length }} messages\n" + CHATML, {"user"}, ["role user", "from '2 messages", "to '3 messages"]),
        (CHATML + "{{ 'Now: ' if add_generation_prompt }}", {"user"}, ["role user", "assistant\\nNow: '"]),
        # One round is append-only, a second is not.
        (CHATML.replace("m.content | trim", "(m.content if loop.revindex < 4 or m.role == 'user' else '') | trim"),
         {"user"}, ["role user", "text before it changes"]),
        # Nothing changes, but what is appended depends on the round.
        (CHATML.replace("m.role }}", "m.role }}{{ loop.index if m.role == 'user' }}"), {"user"}, ["user3", "user5"]),
        (None, {"user"}, ["ValueError", "model.chat_template=FILE"]),
        (CHATML + "{{ range(10**9) | length }}", {"user"}, ["OverflowError", "model.chat_template=FILE"]),
        (CHATML + "{{ 1 // 0 }}", {"user"}, ["ZeroDivisionError", "model.chat_template=FILE"]),
    ],
)  # fmt: skip
def test_a_template_that_does_not_only_append_is_refused(template: str, kinds: set[str], says: list[str]) -> None:
    tokenizer = byte_tokenizer(template)
    with pytest.raises(InputError) as error:
        ChatTemplate(tokenizer, [ADD], kinds, stop_ids(tokenizer))
    for part in says:
        assert part in str(error.value)


def test_a_message_that_changes_what_is_before_it_is_refused_when_it_comes() -> None:
    hiding = "(m.content if 'secret' not in messages[-1].content or loop.last else 'x')"
    tokenizer = byte_tokenizer(CHATML.replace("m.content | trim", hiding))
    template = ChatTemplate(tokenizer, [], {"user"}, stop_ids(tokenizer))
    with pytest.raises(InputError, match="role user: text before it changes"):
        template.appended_ids([{"role": "user", "content": "secret"}], 0)


@given(st.sampled_from(["chatml", "tiny"]), TEXT | st.text("ab .é日", min_size=30), st.integers(8, 60))
def test_text_is_cut_to_the_number_of_tokens(name: str, text: str, max_tokens: int) -> None:
    short = CHATS[name].cut(text, max_tokens)
    clean = text.encode("utf-8", "replace").decode()
    assert len(ids_of(name, short)) <= max_tokens
    assert (short == clean) == (len(ids_of(name, text)) <= max_tokens) or not clean.strip()
    front, note, back = re.fullmatch(r"(.*?)(?:\n\[… (\d+) tokens cut …\]\n(.*))?", short, re.DOTALL).groups()  # type: ignore[union-attr]
    assert clean.startswith(front) and (note is None or clean.endswith(back))


def test_a_cut_text_keeps_its_beginning_and_end_and_says_how_much_is_gone() -> None:
    short = CHATS["tiny"].cut("a" * 50 + "b" * 50, 40)
    assert short == "a" * 12 + "\n[… 76 tokens cut …]\n" + "b" * 12
    assert CHATS["tiny"].cut("a" * 100, 10) == "a" * 10
    assert CHATS["chatml"].cut("é" * 10, 20) == "é" * 10


def test_a_cut_text_fits_where_the_middle_of_a_word_has_other_tokens_than_its_beginning() -> None:
    vocab = {"[UNK]": 0, "a": 1, "##aaaa": 2, "##a": 3}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=1000))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHATML)
    short = ChatTemplate(words, [], set(), []).cut("a" * 401, 20)
    assert len(words(short)["input_ids"]) == 20 and short.startswith("aaaa") and short.endswith("\n" + "a" * 24)


def test_a_template_that_drops_reasoning_serves_a_single_turn() -> None:
    with pytest.raises(InputError, match=REASONING):
        ChatTemplate(TOKENIZERS["thinking"], [], {"user"}, stop_ids(TOKENIZERS["thinking"]))
    dropping = byte_tokenizer("{%- for m in messages -%}{{ m.content.split('</think>')[-1] }}{%- endfor -%}")
    single = ChatTemplate(dropping, [], set(), [])
    assert single.cut("a" * 9, 5) == "a" * 5
    with pytest.raises(InputError, match=f"{REASONING!r} is omitted"):
        single.appended_ids([{"role": "user", "content": "more"}], 0)
