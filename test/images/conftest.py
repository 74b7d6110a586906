"""Vision-language models of the families, and policies over them."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# Before vLLM is imported, where the command line has not set it.
os.environ.setdefault("VLLM_PLUGINS", "")

import pytest
from vision_models import FAMILIES

from torchrl_modules import TransformersWrapper


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request):
    """Model, tokenizer and processor."""
    return FAMILIES[request.param]()


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    """With all parts of the family, as a hub has them."""
    path = tmp_path_factory.mktemp("family")
    for part in family:
        part.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def policy(family):
    model, tokenizer, processor = family
    settings = {"max_new_tokens": 6, "temperature": 0.9}
    return TransformersWrapper(
        model, tokenizer=tokenizer, processor=processor, generate_kwargs=settings
    )
