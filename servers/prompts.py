"""Prompts in (text, token ids, chat) and chat answers out; called off the event loop.  [no jax]"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dsjax.chat import ChatStrings, ReplyParser, encode_chat
from dsjax.errors import invalid
from dsjax.prompt_len import check_texts
from dsjax.request import SamplingParams, TokenEvent
from servers.engine_like import EngineLike
from servers.proto.dsjax.v1 import inference_pb2 as pb

_MODES = {
    pb.THINKING_MODE_UNSPECIFIED: "chat",
    pb.THINKING_MODE_CHAT: "chat",
    pb.THINKING_MODE_THINKING: "thinking",
}


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    params: SamplingParams
    chat_parser: Callable[[], ReplyParser] | None = None  # makes the parser of one answer
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")  # what the ids of tool calls begin with


def of_generate(
    engine: EngineLike,
    strings: ChatStrings,
    message: pb.GenerateRequest | pb.PrefetchRequest,
    params: SamplingParams,
) -> Prompt:
    """The prompt of a Generate call; `strings` are the model folder's. Raises RequestError(INVALID_ARGUMENT)."""
    match message.WhichOneof("prompt"):
        case "token_ids":
            return Prompt(list(message.token_ids.ids), params)
        case "text":
            check_texts(tokenizer_of(engine, "text"), [message.text], engine.max_model_len)
            return Prompt(_encode_text(engine, message.text, message.add_bos), params)
        case "chat":
            # Before the messages are read, which may be millions; a developer's may be left out of the prompt.
            contents = (part.content for part in message.chat.messages if part.role != "developer")
            check_texts(tokenizer_of(engine, "chat"), contents, engine.max_model_len)
            tools = _tools(message.chat)
            mode = _mode(message.chat)
            ids = _encode_chat(engine, strings, message.chat, tools, mode, engine.max_model_len)
            return Prompt(ids, params, lambda: ReplyParser(mode, tools=tools))
    raise invalid("prompt is absent: set text, token_ids or chat")


def of_tokenize(engine: EngineLike, strings: ChatStrings, message: pb.TokenizeRequest) -> list[int]:
    """The ids that `of_generate` would make, and of longer texts too. Raises RequestError(INVALID_ARGUMENT)."""
    match message.WhichOneof("prompt"):
        case "text":
            return _encode_text(engine, message.text, message.add_bos)
        case "chat":
            return _encode_chat(engine, strings, message.chat, _tools(message.chat), _mode(message.chat), None)
    raise invalid("prompt is absent: set text or chat")


def detokenize(engine: EngineLike, token_ids: list[int], skip_special_tokens: bool) -> str:
    """Raises RequestError(INVALID_ARGUMENT) for an id outside the vocabulary."""
    vocab_size = engine.model_config.vocab_size
    for token in token_ids:
        if token >= vocab_size:
            raise invalid(f"token_ids holds {token}: it must be less than vocab_size={vocab_size}")
    return tokenizer_of(engine, "token_ids").decode(token_ids, skip_special_tokens=skip_special_tokens)


class ChatAnswer:
    """Reads one answer to a chat. Who reads it again finds tool calls of the same ids."""

    def __init__(self, prompt: Prompt, index: int):
        assert prompt.chat_parser is not None
        self._parser = prompt.chat_parser()
        self._call_ids = (f"{prompt.call_id}_{index}_{number}" for number in itertools.count())

    def delta(self, event: TokenEvent) -> pb.ChatDelta:
        """What `event.text` means; the last event also gives out what the parser held back."""
        deltas = [self._parser.feed(event.text)]
        if event.finished:
            deltas.append(self._parser.finish())
        return pb.ChatDelta(
            reasoning_content="".join(delta.reasoning for delta in deltas),
            content="".join(delta.content for delta in deltas),
            tool_calls=[
                pb.ToolCall(id=next(self._call_ids), name=call.name, arguments=call.arguments)
                for delta in deltas
                for call in delta.tool_calls
            ],
        )


def _mode(chat: pb.ChatPrompt) -> str:
    if chat.thinking_mode not in _MODES:  # proto3 enums are open: a newer client may know more modes
        raise invalid(f"thinking_mode={chat.thinking_mode} is not allowed: it must be CHAT or THINKING")
    return _MODES[chat.thinking_mode]


def _tools(chat: pb.ChatPrompt) -> list[dict[str, Any]]:
    """The tools in OpenAI's outer form."""
    tools = []
    for i, text in enumerate(chat.tools):
        tool = _json_object(f"tools[{i}]", text)
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tools


def _encode_chat(
    engine: EngineLike,
    strings: ChatStrings,
    chat: pb.ChatPrompt,
    tools: list[dict[str, Any]],
    mode: str,
    max_model_len: int | None,
) -> list[int]:
    tokenizer = tokenizer_of(engine, "chat")
    response_format = None
    if chat.HasField("response_format"):
        response_format = _json_object("response_format", chat.response_format)
    return encode_chat(
        tokenizer,
        [_message(message) for message in chat.messages],
        max_model_len=max_model_len,
        thinking_mode=mode,
        reasoning_effort=chat.reasoning_effort if chat.HasField("reasoning_effort") else None,
        drop_thinking=chat.drop_thinking if chat.HasField("drop_thinking") else True,
        tools=tools or None,
        response_format=response_format,
        strings=strings,
        reply_after_system=True,
    )


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    """OpenAI's form of a message; empty fields are left out, so that chat.py's checks see them as absent."""
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("reasoning_content", "tool_call_id", "task"):
        if value := getattr(message, name):
            out[name] = value
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return out


def _json_object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{field} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid(f"{field} must be a JSON object, not {type(value).__name__}")
    return value


def tokenizer_of(engine: EngineLike, field: str) -> Any:
    """The engine's tokenizer. Raises RequestError(INVALID_ARGUMENT) naming `field` if it has none."""
    if engine.tokenizer is None:
        raise invalid(f"{field} needs a tokenizer and the model's folder has none: send token_ids, or set --tokenizer")
    return engine.tokenizer


def _encode_text(engine: EngineLike, text: str, add_bos: bool) -> list[int]:
    tokenizer = tokenizer_of(engine, "text")
    bos = [tokenizer.bos_token_id] if add_bos and tokenizer.bos_token_id is not None else []
    return bos + tokenizer.encode(text)
