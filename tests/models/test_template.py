import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rl_core.errors import InputError
from rl_core.models.load import load_tokenizer, stop_tokens
from rl_core.models.template import FILE, TEMPLATES, change_template, templated_folder
from rl_core.rollout.agent.chat import ChatTemplate

TALK = [{"role": "user", "content": "3 1"}]
THINKS = (
    "{{- messages[0].content -}}"
    "{%- if enable_thinking is not defined or enable_thinking -%}<think>{%- else -%}{{ effort }}{%- endif -%}"
)


def text(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return str(tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True))


def test_a_file_and_values_of_its_variables_are_part_of_the_folder(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(THINKS)
    before = text(tiny_model)
    plain = templated_folder(tiny_model, str(file), {}, tmp_path / "models")
    chosen = templated_folder(
        tiny_model, str(file), {"enable_thinking": False, "effort": 'a "b"\n'}, tmp_path / "models"
    )
    assert (text(plain), text(chosen)) == ("3 1<think>", '3 1a "b"\n')
    assert text(tiny_model) == before
    for folder in (plain, chosen):
        assert stop_tokens(folder) == stop_tokens(tiny_model)
        assert (folder / "model.safetensors").read_bytes() == (tiny_model / "model.safetensors").read_bytes()
    assert templated_folder(tiny_model, str(file), {}, tmp_path / "models") == plain
    assert templated_folder(tiny_model, None, {}, tmp_path / "models") == tiny_model


def test_variables_of_the_checkpoints_own_template(tiny_model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(tiny_model, own)
    (own / FILE).write_text(THINKS)
    folder = templated_folder(own, None, {"enable_thinking": False, "effort": 3}, tmp_path / "models")
    assert text(folder) == "3 13"


@pytest.mark.parametrize("template", sorted(file.stem for file in TEMPLATES.glob("*.jinja")))
def test_shipped_templates_only_append(template: str, tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    change_template(tokenizer, template, {})
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    for tools in ([], [tool]):
        ChatTemplate(tokenizer, tools, {"tool", "user"} if tools else {"user"}, [tokenizer.eos_token_id])


def test_chatml_renders_tool_calls_beside_empty_content(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    change_template(tokenizer, "chatml", {})
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    talk: Any = [*TALK, turn]
    seen = tokenizer.apply_chat_template(talk, tokenize=False)
    wanted = '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
    assert str(seen).endswith(wanted)


@pytest.mark.parametrize(("content", "seen"), [(None, "No such file"), ("{% if %}", "TemplateSyntaxError")])
def test_a_template_that_cannot_be_used_is_an_input_error(
    content: str | None, seen: str, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError) as raised:
        change_template(load_tokenizer(tiny_model), str(file), {})
    assert seen in raised.value.seen and raised.value.where == f"model.chat_template={file}"
