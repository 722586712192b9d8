"""Reward model: a sequence-classification checkpoint that scores finished conversations."""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rl_core.errors import InputError
from rl_core.models.load import check_model_folder, load_config, load_tokenizer

Messages = list[dict[str, str]]
SETTING = "reward.model.path"


def check_reward_model(path: str) -> None:
    """Raises InputError unless the folder has a sequence-classification checkpoint with one label and a tokenizer."""
    where = f"{SETTING}={path}"
    try:
        folder = check_model_folder(path)
        load_tokenizer(folder)
    except InputError as error:
        fix = f"set {SETTING}=FOLDER with config.json, *.safetensors and the tokenizer's files"
        raise InputError(error.expected, error.seen, where, fix) from error
    fix = "use a checkpoint trained as a reward model, such as Qwen3ForSequenceClassification"
    config = load_config(folder)
    names = config.architectures or []
    if not any(name.endswith("ForSequenceClassification") for name in names):
        # transformers would load it with a randomly initialised head.
        raise InputError("a sequence-classification checkpoint", f"architectures {names}", where, fix)
    if config.num_labels != 1:
        raise InputError("a checkpoint with one label", f"{config.num_labels} labels", where, fix)


class RewardModel:
    """A reward model with its tokenizer and chat template."""

    def __init__(self, path: str, dtype: torch.dtype, max_tokens: int) -> None:
        """Loads the checkpoint to the CPU; a batch has at most `max_tokens` tokens including padding, or one row."""
        from transformers import AutoModelForSequenceClassification  # takes seconds

        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(path)
        self.max_tokens = max_tokens
        self.model, report = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
        if mismatched := sorted(report["mismatched_keys"]):
            name, stored, wanted = mismatched[0]
            raise InputError(
                "weights of the shapes in config.json",
                f"{name} of shape {list(stored)} instead of {list(wanted)} ({len(mismatched)} such weights)",
                f"{SETTING}={path}",
                "use the config.json of these weights",
            )
        if report["missing_keys"]:
            raise InputError(
                "a checkpoint with all weights of a sequence classifier",
                f"no {', '.join(sorted(report['missing_keys']))}",
                f"{SETTING}={path}",
                "save the model with its scoring head",
            )
        self.model.eval()
        self.text_config = self.model.config.get_text_config()
        self.pad_token: int | None = self.text_config.pad_token_id

    def encode(self, messages: Messages, response: str) -> list[int]:
        """Token ids of a conversation; raises InputError if the chat template rejects it."""
        if not self.tokenizer.chat_template:
            ids: list[int] = self.tokenizer("".join(message["content"] for message in messages) + response)["input_ids"]
            return ids
        conversation = [*messages, {"role": "assistant", "content": response}]
        try:
            return list(self.tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False))
        except Exception as error:  # templates are programs and can raise anything
            raise InputError(
                "messages accepted by the reward model's chat template",
                f"{type(error).__name__}: {error}",
                f"{SETTING}, messages {[message['role'] for message in conversation]}",
                "change the roles or their order in the rows' prompts, or remove the template from the model's folder",
            ) from error

    @torch.no_grad()
    def score(self, conversations: list[list[int]]) -> Tensor:
        """Scores [B] float32 on the CPU; NaN for an empty conversation and one longer than the model's maximum."""
        scores_B = torch.full((len(conversations),), torch.nan)
        limit = getattr(self.text_config, "max_position_embeddings", None) or float("inf")
        rows = [i for i, ids in enumerate(conversations) if 0 < len(ids) <= limit]
        for batch in batches([len(conversations[i]) for i in rows], self.max_tokens):
            members = [rows[i] for i in batch]
            scores_B[members] = self._forward([conversations[i] for i in members])
        return scores_B

    def _forward(self, conversations: list[list[int]]) -> Tensor:
        if self.pad_token is None:
            # The model locates the last token before the padding, so pad with any id that occurs in no conversation.
            used = {token for ids in conversations for token in ids}
            pad = next(token for token in range(self.text_config.vocab_size) if token not in used)
        else:
            pad = self.pad_token
        self.text_config.pad_token_id = pad
        longest = max(map(len, conversations))
        ids_BT = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in conversations])
        length_B = torch.tensor([len(ids) for ids in conversations])
        mask_BT = (torch.arange(longest) < length_B[:, None]).long()
        device = self.model.device
        output = self.model(input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device))
        score_B: Tensor = output.logits[:, 0].float().cpu()
        return score_B


def batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Row indices in batches of at most `max_tokens` tokens including padding, or of one row; sorted by length."""
    result: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if result and (len(result[-1]) + 1) * lengths[result[-1][0]] <= max_tokens:
            result[-1].append(index)
        else:
            result.append([index])
    return result
