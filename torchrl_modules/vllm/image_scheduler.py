"""Scheduler of vLLM that sends its workers every image of a request.

vLLM leaves those out that the cache of prefixes covers: nobody has to read them. Where that cache
is emptied for new weights, the requests in flight are read again from their first token, and a
worker that has not got an image ends its engine ("Encoder cache miss", vLLM 0.32).
"""

import functools
from typing import Any

from .runtime import import_vllm


def scheduler_for_images(*, vllm_config: Any, **parts: Any) -> Any:
    """Build the scheduler that vLLM would take for a server, with :func:`send_all_images`.

    vLLM takes its path as ``scheduler_cls``.

    Args:
        vllm_config: of the server.
        **parts: as of vLLM's own schedulers.
    """
    names = import_vllm(in_process=False)
    is_async = vllm_config.scheduler_config.async_scheduling
    scheduler = (names.AsyncScheduler if is_async else names.Scheduler)(
        vllm_config=vllm_config, **parts
    )
    send_all_images(scheduler)
    return scheduler


def send_all_images(scheduler: Any) -> None:
    """Let a scheduler's new requests reach the workers with all of their images.

    Args:
        scheduler: of vLLM, before its first step.
    """
    if getattr(scheduler, "sends_all_images", False):
        return
    schedule = scheduler.schedule

    @functools.wraps(schedule)
    def with_images(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        for new in step.scheduled_new_reqs:
            new.mm_features = scheduler.requests[new.req_id].mm_features
        return step

    scheduler.schedule, scheduler.sends_all_images = with_images, True
