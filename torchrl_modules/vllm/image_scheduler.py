"""The scheduler of vLLM with images that its workers can read again.

vLLM 0.32 leaves the pixels out of a request that begins with a cached prefix with the image in it.
Where the request is read from its beginning later, for new weights say, the scheduler asks a worker
for what this image becomes, which it can't say, and the engine dies of an "Encoder cache miss".
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from .releases import strips_images

IMAGE_SCHEDULER: Final = "torchrl_modules.vllm.image_scheduler.image_scheduler"
"""By what vLLM finds it, as its ``scheduler_cls``."""


def image_scheduler(*, vllm_config: Any, **settings: Any) -> Any:
    """Build the scheduler that vLLM would take by itself, which sends images whole.

    Args:
        vllm_config: of the engine.
        settings: what else vLLM builds it with.
    """
    config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_cls = None
    scheduler = config.get_scheduler_cls()(vllm_config=vllm_config, **settings)
    send_whole_images(scheduler)
    return scheduler


def send_whole_images(scheduler: Any) -> None:
    """Let a scheduler send the pixels of all images of new requests, cached or not."""
    already = isinstance(scheduler.schedule, partial) and scheduler.schedule.func is _schedule
    if strips_images(scheduler.vllm_config) and not already:
        scheduler.schedule = partial(_schedule, scheduler.schedule, scheduler)


def _schedule(schedule: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    output = schedule(*args, **options)
    for new in output.scheduled_new_reqs:
        new.mm_features = scheduler.requests[new.req_id].mm_features
    return output


def rereads_images(vllm_config: Any) -> bool:
    """Return whether a server can read the images of its requests again, for new weights."""
    chosen = vllm_config.scheduler_config.scheduler_cls
    return chosen == IMAGE_SCHEDULER or not strips_images(vllm_config)
