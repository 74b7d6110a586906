"""The model that is trained and the policy that samples, from the settings."""

from collections.abc import Sequence
from pathlib import Path

from config import Engine, GRPOConfig
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from torchrl_data.conversation.conversations import Message
from torchrl_data.templates.registry import builtin_template
from torchrl_envs.tasks.task import Task
from torchrl_modules import LLMWrapperBase, SamplingParameters, TransformersWrapper
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer


def build_embedded_model(task: Task, path: Path) -> str:
    """Make the embedded model and its tokenizer, as a model directory.

    Args:
        task: the tokenizer is trained on its demonstrations.
        path: the directory.

    Returns:
        The path, to be loaded like any model.
    """
    tokenizer = train_tokenizer(rendered(task.demonstrations[:1024]), isolated=task.isolated)
    tokenizer.save_pretrained(path)
    tiny_qwen3(len(tokenizer)).save_pretrained(path)
    return str(path)


def rendered(chats: Sequence[Sequence[Message]]) -> list[str]:
    """Conversations as the chat template writes them."""
    texts, _ = render_jinja_template(
        [list(chat) for chat in chats], chat_template=builtin_template("chatml")
    )
    return list(texts)


def build_sampler(
    cfg: GRPOConfig, model: str, max_new_tokens: int, tokenizer: PreTrainedTokenizerBase
) -> LLMWrapperBase:
    """The policy that samples; its weights are replaced after every step.

    Args:
        cfg: the settings.
        model: hub id or path.
        max_new_tokens: most tokens of a turn.
        tokenizer: of the model.
    """
    sampling = SamplingParameters(
        max_new_tokens=max_new_tokens,
        temperature=cfg.policy.temperature,
        top_p=cfg.policy.top_p,
        top_k=cfg.policy.top_k,
    )
    template = cfg.policy.chat_template_name
    if cfg.engine is Engine.vllm:
        from torchrl_modules import vLLMWrapper

        return vLLMWrapper(
            model,
            tokenizer=tokenizer,
            sampling=sampling,
            chat_template_name=template,
            write_tokens=False,
        )
    return TransformersWrapper(
        model,
        tokenizer=tokenizer,
        sampling=sampling,
        chat_template_name=template,
        write_tokens=False,
    )
