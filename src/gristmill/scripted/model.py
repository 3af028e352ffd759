"""The scripted model: from a request to an answer.

Invariant: the answer is a function of script, request, weight version and the number of earlier asks of the same
request. Nothing is sent from here.

Not here: routes (engine), wire forms, delivery.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Final, cast

from gristmill.scripted.answer import Answer
from gristmill.scripted.asked import Asked, EngineRefused
from gristmill.scripted.choice import Chosen
from gristmill.scripted.composing import compose
from gristmill.scripted.generation import Choice, Generation, Parsers, Text, generate
from gristmill.scripted.sampling import Limits
from gristmill.scripted.script import Behaviour, Reply, Settings
from gristmill.scripted.template import TemplateOptions, render
from gristmill.scripted.tokenizer import END_OF_TURN, the_tokenizer

__all__ = ["behaviour_of", "make_answer", "prompt_of_chat", "prompts_of", "response_id_of", "shortened"]

JsonObject = dict[str, Any]

_BEHAVIOUR: Final = Behaviour.__struct_fields__


def behaviour_of(reply: Reply, settings: Settings) -> Behaviour:
    """Return how a reply is served: what it says itself, else what the script says of all replies."""
    said = {name: getattr(reply, name) for name in _BEHAVIOUR}
    common = settings.behaviour
    return Behaviour(**{name: getattr(common, name) if value is None else value for name, value in said.items()})


def prompt_of_chat(body: JsonObject, messages: Sequence[JsonObject], tools: Sequence[Any], settings: Settings) -> str:
    """Render the prompt of a Chat request.

    Raises:
        EngineRefused: 400.
    """
    template = body.get("chat_template_kwargs")
    asked: JsonObject = cast(JsonObject, template) if isinstance(template, dict) else {}
    generation_prompt = body.get("add_generation_prompt")
    options = TemplateOptions(
        thinking_model=settings.thinking,
        enable_thinking=asked.get("enable_thinking") is not False,
        add_generation_prompt=generation_prompt is not False,
        continue_final_message=bool(body.get("continue_final_message")),
    )
    return render(messages, tools, options)


def prompts_of(asked: Asked, settings: Settings) -> list[list[int]]:
    """Return the token ids of a request's prompts.

    Raises:
        EngineRefused: 400: ids outside the vocabulary, a prompt or an output that is too long.
    """
    tokenizer = the_tokenizer()
    if asked.route == "completions":
        prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]
        for ids in prompts:
            _check_ids(ids, None)
    else:
        given, where = _token_in(asked, settings)
        if given is None:
            tools = cast("list[Any]", asked.body.get("tools") or [])
            given = tokenizer.encode(prompt_of_chat(asked.body, asked.messages, tools, settings))
        else:
            _check_ids(given, where)
        prompts = [given]
    _check_lengths(prompts, asked, settings)
    return prompts


def _token_in(asked: Asked, settings: Settings) -> tuple[list[int] | None, str]:
    """Return prompt ids that the request itself gives, and the field that holds them."""
    if settings.profile == "sglang":
        given, where = asked.body.get("input_ids"), "input_ids"
    else:
        where = "kv_transfer_params.prompt_token_ids"
        params: Any = asked.body.get("kv_transfer_params") if settings.profile == "vllm" else None
        given = cast(JsonObject, params).get("prompt_token_ids") if isinstance(params, dict) else None
    if given is not None and not isinstance(given, list):
        raise EngineRefused(400, f"expected a list of token ids (parameter={where})", param=where)
    return cast("list[int] | None", given), where


def _check_ids(ids: Sequence[Any], where: str | None) -> None:
    size = the_tokenizer().size
    for token in ids:
        if type(token) is not int or not 0 <= token < size:
            suffix = f" (parameter={where})" if where else ""
            raise EngineRefused(400, f"Token id {token} is out of vocabulary{suffix}", param=where)


def _check_lengths(prompts: Sequence[Sequence[int]], asked: Asked, settings: Settings) -> None:
    longest, most = max(map(len, prompts)), settings.max_model_len
    if longest >= most:
        raise EngineRefused(
            400,
            f"This model's maximum context length is {most} tokens. However, your prompt contains at least "
            f"{most + 1} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
            f"length of the prompt. (parameter=input_tokens, value={most + 1})",
            param="input_tokens",
        )
    if asked.max_tokens is not None and asked.max_tokens > most:
        raise EngineRefused(
            400,
            f"max_tokens={asked.max_tokens} cannot be greater than max_model_len={most}. Please request fewer "
            f"output tokens. (parameter=max_tokens, value={asked.max_tokens})",
            param="max_tokens",
        )


def response_id_of(asked: Asked, settings: Settings) -> str:
    """Return the id of a reply: the request's own id where it names one."""
    named = asked.body.get("rid") if settings.profile == "sglang" else asked.body.get("request_id")
    given = asked.headers.get("x-request-id") or (named if isinstance(named, str) else None)
    if settings.profile == "sglang":
        return (named if isinstance(named, str) else None) or uuid.uuid4().hex
    prefix = "chatcmpl-" if asked.route == "chat" else "cmpl-"
    return prefix + (given or uuid.uuid4().hex[:16])


def make_answer(chosen: Chosen, asked: Asked, settings: Settings, weights: str, response_id: str) -> Answer:
    """Make the answer of a request.

    Args:
        chosen: its reply.
        asked: the request.
        settings: the script's.
        weights: the weight version now.
        response_id: id of the reply.

    Raises:
        EngineRefused: 400.
    """
    prompts = prompts_of(asked, settings)
    behaviour = behaviour_of(chosen.reply, settings)
    choices: list[Choice] = []
    for position, prompt in enumerate(prompts):
        for number in range(asked.n):
            index = position * asked.n + number
            generation = _generated(chosen.reply, chosen, asked, settings, behaviour, index, len(prompt))
            choices.append(Choice(index, generation, position))
    wrong = behaviour.wrong
    return Answer(
        asked=asked,
        settings=settings,
        behaviour=behaviour,
        prompts=prompts,
        choices=tuple(choices),
        response_id=wrong.response_id if wrong is not None and wrong.response_id is not None else response_id,
        created_s=int(time.time()),
        model=asked.model or settings.models[0],
        weights=weights,
        end_id=the_tokenizer().control(END_OF_TURN),
    )


def _generated(
    reply: Reply,
    chosen: Chosen,
    asked: Asked,
    settings: Settings,
    behaviour: Behaviour,
    index: int,
    prompt_length: int,
) -> Generation:
    composed = compose(chosen, asked, settings, index)
    room = settings.max_model_len - prompt_length
    seed = settings.seed + asked.seed + index
    split = settings.split if behaviour.split is None else behaviour.split
    limits = Limits(
        most=min(room, asked.max_tokens or room),
        cut=reply.cut,
        stop=asked.stop,
        keep_stop=asked.flag("include_stop_str_in_output"),
        stop_ids=asked.stop_ids,
        ignore_eos=asked.flag("ignore_eos"),
        show_special=not asked.flag("skip_special_tokens", True) and asked.route == "completions",
    )
    chat = asked.route == "chat"
    parsers = Parsers(
        thinking=chat and settings.thinking and asked.thinking,
        tools=chat and bool(asked.tools) and asked.choice != "none",
        forced=asked.choice if asked.choice in ("required", "named") else None,
    )
    return generate(Text(composed.text, composed.eos, seed, split), limits, parsers, reply.finish, seed)


def shortened(answer: Answer, counts: Sequence[int]) -> Answer:
    """Return the answer that was aborted after so many ids of each choice."""
    choices = [
        choice._replace(generation=choice.generation.cut(count))
        for choice, count in zip(answer.choices, counts, strict=True)
    ]
    return answer._replace(choices=tuple(choices))
