"""Batches of conversations: tokens, messages, layouts, templates, entry names.

Every public name is imported when it is first used, so that importing this package costs nothing.
"""

import ast
import sys
from collections.abc import Callable, Collection
from difflib import get_close_matches
from dis import opmap
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import keys as keys
    from .answers import read_completion as read_completion
    from .answers import train_answer as train_answer
    from .content import ContentBase as ContentBase
    from .conversation import ConversationRecord as ConversationRecord
    from .conversation import Conversations as Conversations
    from .conversation import EncodedMessages as EncodedMessages
    from .conversation import Position as Position
    from .conversation import Source as Source
    from .conversation import Turn as Turn
    from .conversation import stream_number as stream_number
    from .conversation_io import read_conversations as read_conversations
    from .conversation_io import row_tensordicts as row_tensordicts
    from .conversation_io import write_conversations as write_conversations
    from .conversation_view import history_view as history_view
    from .display.html import conversation_html as conversation_html
    from .display.html import messages_html as messages_html
    from .display.terminal import show_conversation as show_conversation
    from .display.terminal import show_messages as show_messages
    from .display.text_history import TextHistory as TextHistory
    from .history import History as History
    from .labelled_answers import LabelledAnswer as LabelledAnswer
    from .labelled_answers import kto_rows as kto_rows
    from .labelled_answers import label_row as label_row
    from .labelled_answers import read_labelled as read_labelled
    from .labelled_answers import with_mismatched as with_mismatched
    from .layout import ChatHistory as ChatHistory
    from .layout import LogProbs as LogProbs
    from .layout import Masks as Masks
    from .layout import Text as Text
    from .layout import Tokens as Tokens
    from .layout import conversation_tokens as conversation_tokens
    from .messages import check_messages as check_messages
    from .missing_entry import MissingEntryError as MissingEntryError
    from .missing_entry import require_entries as require_entries
    from .preferences import PreferencePair as PreferencePair
    from .preferences import mark_pairs as mark_pairs
    from .preferences import pair_of as pair_of
    from .preferences import preference_rows as preference_rows
    from .preferences import read_pair as read_pair
    from .ragged.packed import cumulative_lengths as cumulative_lengths
    from .ragged.packed import pack as pack
    from .ragged.packed import pad as pad
    from .ragged.packed import sequence_index as sequence_index
    from .ragged.packed import unpack as unpack
    from .sampling_masks import SamplingMasks as SamplingMasks
    from .saved_rows import row_from_state as row_from_state
    from .saved_rows import row_state as row_state
    from .stop_reason import FinishReason as FinishReason
    from .stop_reason import StopReason as StopReason
    from .templates.content_shown import ToolsNotShownError as ToolsNotShownError
    from .templates.control_tokens import ControlTokenGuard as ControlTokenGuard
    from .templates.demonstrations import encode_demonstrations as encode_demonstrations
    from .templates.encoder import ConversationEncoder as ConversationEncoder
    from .templates.image_processor import ImageProcessor as ImageProcessor
    from .templates.registry import add_chat_template as add_chat_template
    from .templates.registry import builtin_template as builtin_template
    from .templates.registry import resolve_template as resolve_template
    from .templates.registry import template_names as template_names
    from .templates.rendering_identity import check_same_rendering as check_same_rendering
    from .text_spans.span_aligner import SpanAligner as SpanAligner
    from .text_spans.spans import align_spans as align_spans
    from .token_scorer import TokenScorer as TokenScorer
    from .token_scorer import TokenScores as TokenScores
    from .tool_calls.parser import parse_tool_calls as parse_tool_calls
    from .value_network import RewardNetwork as RewardNetwork
    from .value_network import ValueNetwork as ValueNetwork


def page(path: str) -> str:
    """Return where a page is that an error names: its address, where the distribution has one.

    Args:
        path: in the repository, ``docs/vllm.md``; what is given where there is no address.
    """
    installed = import_module("importlib.metadata").distributions(name="torchrl-agents")
    urls = [url for each in installed for url in each.metadata.get_all("Project-URL") or ()]
    first = dict(url.split(", ") for url in reversed(urls)).get("Documentation", "docs/index.md")
    return first.removesuffix("docs/index.md") + path


def import_package(module: str, *, who: str, install: str) -> Any:
    """Import a package that only some need.

    Args:
        module: its name, or that of a module in it.
        who: needs it, named in the error.
        install: what to do where it is missing, ``"pip install openai"``.

    Returns:
        The module.

    Raises:
        ImportError: the package is not installed; or it is, and lacks what it imports itself, which
            the message names.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package, lacks = module.partition(".")[0], error.name or ""
        if lacks == package:
            words = f"{who} needs the package {package}, which is not installed: {install}."
        elif isinstance(error, ModuleNotFoundError) and lacks.partition(".")[0] != package:
            words = (
                f"{who} needs the package {package}, which is installed but can't be imported, "
                f"because the module {lacks} that it needs is missing: pip install {lacks}."
            )
        else:
            words = (
                f"{who} needs the package {package}, which is installed but can't be imported "
                f"({error}). Another version may do: {install}."
            )
        raise ImportError(words, name=error.name) from error


def unknown_name(package: str, name: str, known: Collection[str], hint: str = "") -> Exception:
    """Give the error for a public name that there is not, with those that are like it.

    ``from package import name`` shows an ``ImportError`` as it is, and hides the words of an
    ``AttributeError``, which everything else expects.

    Args:
        package: that was asked.
        name: it lacks.
        known: names that it has.
        hint: a sentence to say in place of names that are like it.
    """
    close = get_close_matches(name, known, n=3, cutoff=0.75)
    guess = f" Did you mean {' or '.join(close)}?" if close else ""
    guess = f" {hint}" if hint else guess
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and name not in frame.f_code.co_names:
        frame = frame.f_back  # of a package's own functions
    asks = None if frame is None else frame.f_code.co_code[frame.f_lasti]
    if asks == opmap["IMPORT_FROM"] and f"{package}.{name}" not in sys.modules:
        return ImportError(f"cannot import name {name!r} from {package!r}.{guess}", name=name)
    have = guess or f" It has {', '.join(sorted(known))}."
    return AttributeError(f"module {package!r} has no attribute {name!r}.{have}", name=name)


@cache
def _homes(file: str) -> dict[str, str]:
    """Of each name that a package imports ``if TYPE_CHECKING``, the module that it is in."""
    body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    lines = [line for block in body if isinstance(block, ast.If) for line in block.body]
    return {
        name.name: "." * line.level + (line.module or name.name)
        for line in lines
        if isinstance(line, ast.ImportFrom)
        for name in line.names
    }


def lazy_names(package: str, file: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that imports each public name when it is first used.

    Args:
        package: its ``__name__``.
        file: its ``__file__``. What is imported there ``if TYPE_CHECKING`` says which public names
            there are (``__all__``), and where each is.
    """

    def find(name: str) -> Any:
        if name == "__version__":
            return __version__
        homes = _homes(file)
        if name == "__all__":
            return sorted(homes)
        if name not in homes:
            raise unknown_name(package, name, homes)
        module = import_module(homes[name], package)
        if homes[name] == f".{name}":
            return module
        return import_module(".torchrl_arguments", __name__).knows_torchrl(getattr(module, name))

    return find


_find = lazy_names(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "TopKRewardSelector":  # where TorchRL has it
        hint = "It is in 'objectives': from objectives import TopKRewardSelector."
        raise unknown_name(__name__, name, _find("__all__"), hint)
    globals()[name] = value = _find(name)  # found once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_find("__all__")})
