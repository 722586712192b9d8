"""Chat templates other than the checkpoint's own, and values of a template's variables.

Values are written into the template as its first statements, so that the exported model renders prompts as in training.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rl_core.errors import InputError
from rl_core.models.load import load_tokenizer

TEMPLATES = Path(__file__).with_name("templates")
FILE = "chat_template.jinja"


def change_template(
    tokenizer: PreTrainedTokenizerBase, template: str | None, variables: Mapping[str, bool | int | float | str]
) -> None:
    """Replaces the tokenizer's template by a shipped one or a file, and sets variables of it.

    Raises InputError if there is no such template, or if it cannot render a user's message.
    """
    if template is None and not variables:
        return
    text = tokenizer.chat_template if template is None else _read(template)
    if not isinstance(text, str):
        raise InputError(
            "a tokenizer with one chat template",
            f"{len(text)} named ones" if text else "none",
            "data.chat_template_kwargs",
            "set model.chat_template=FILE too",
        )
    values = "".join(
        f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} -%}}\n" for name, value in variables.items()
    )
    tokenizer.chat_template = values + text
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "question"}], tokenize=False)
    except Exception as error:  # templates are programs and can raise anything
        raise InputError(
            "a chat template that renders a user's message",
            f"{type(error).__name__}: {error}",
            f"model.chat_template={template}" if template else "data.chat_template_kwargs",
            "correct the template, or the names and values of its variables",
        ) from error


def _read(template: str) -> str:
    shipped = sorted(file.stem for file in TEMPLATES.glob("*.jinja"))
    file = TEMPLATES / f"{template}.jinja" if template in shipped else Path(template).expanduser()
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"a Jinja file, or one of {', '.join(shipped)}",
            str(error),
            f"model.chat_template={template}",
            "set model.chat_template=FILE, or leave it out to use the checkpoint's own template",
        ) from error


def templated_folder(
    folder: Path, template: str | None, variables: Mapping[str, bool | int | float | str], parent: Path
) -> Path:
    """The checkpoint's folder, or one inside `parent` with links to its files and with the changed template."""
    if template is None and not variables:
        return folder
    tokenizer = load_tokenizer(folder)
    change_template(tokenizer, template, variables)
    text = str(tokenizer.chat_template)
    key = hashlib.sha256(f"{folder.resolve()}\n{text}".encode()).hexdigest()
    target = parent / f"template-{key[:16]}"
    if not target.exists():
        parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".draft", dir=parent))
        for file in folder.resolve().iterdir():
            if file.is_file() and file.name != FILE:
                (draft / file.name).symlink_to(file)
        (draft / FILE).write_text(text)
        try:
            draft.rename(target)
        except OSError:  # another run was first
            shutil.rmtree(draft)
            if not target.exists():
                raise
    return target
