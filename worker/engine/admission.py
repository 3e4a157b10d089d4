"""Whether a request can ever run here. Refusals are RequestErrors: they become that line's error."""

from __future__ import annotations

from context_daemon.records import SamplingParams
from worker.engine.config import EnginePlan
from worker.engine.pages import pages_for
from worker.engine.protocol import EngineRequest, RequestError, ResumeState


def check(request: EngineRequest, resume: ResumeState | None, plan: EnginePlan) -> None:
    """Raises RequestError when the request can never fit, ValueError when the resume state contradicts itself."""
    _check_tokens(request.prompt_token_ids, plan.spec.vocab_size)
    _check_params(request.params)
    prompt = len(request.prompt_token_ids)
    if prompt + 1 > plan.max_model_len:
        raise RequestError(
            f"the prompt has {prompt} tokens: with one more it exceeds max_model_len {plan.max_model_len}"
        )
    longest = min(prompt + request.params.max_tokens, plan.max_model_len)
    needed = pages_for(longest - 1, plan.page_size)  # the last token's KV is never needed
    if needed > plan.num_pages:
        raise RequestError(
            f"prompt ({prompt} tokens) and max_tokens ({request.params.max_tokens}) need {needed} KV pages, "
            f"the engine has {plan.num_pages}"
        )
    if resume is not None:
        _check_resume(request, resume, plan, longest)


def _check_tokens(token_ids: tuple[int, ...], vocab_size: int) -> None:
    if not token_ids:
        raise RequestError("the prompt is empty: it needs at least one token")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise RequestError(f"the prompt has a token id outside the vocabulary [0, {vocab_size})")


def _check_params(params: SamplingParams) -> None:
    if params.max_tokens < 1:
        raise RequestError(f"max_tokens is {params.max_tokens}: it must be at least 1")
    if not 0 <= params.temperature < float("inf"):
        raise RequestError(f"temperature is {params.temperature}: it must be 0 or more")
    if params.top_k < 0:
        raise RequestError(f"top_k is {params.top_k}: it must be 0 (off) or more")
    if not 0 < params.top_p <= 1:
        raise RequestError(f"top_p is {params.top_p}: it must be in (0, 1]")


def _check_resume(request: EngineRequest, resume: ResumeState, plan: EnginePlan, longest: int) -> None:
    known = len(request.prompt_token_ids) + len(resume.token_ids)
    if known >= longest:
        raise ValueError(
            f"{request.key} has all its tokens already ({len(resume.token_ids)} of max_tokens "
            f"{request.params.max_tokens}): finish it, do not resume it"
        )
    if not 0 <= resume.fetch_from <= resume.fetch_to <= known - 1:
        fetch = f"[{resume.fetch_from}, {resume.fetch_to})"
        raise ValueError(f"{request.key}: positions {fetch} to be imported are not within [0, T-1 = {known - 1})")
