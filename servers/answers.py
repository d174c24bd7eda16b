"""The messages of one answer, made of its token events.  [no jax]"""

from __future__ import annotations

from collections.abc import Sequence

from dsjax.request import FinishReason, Request, TokenEvent
from servers import convert, prompts
from servers.proto.dsjax.v1 import inference_pb2 as pb


class Answer:
    """Makes messages of an answer's events, as they come or all at once: joined, they say the same."""

    def __init__(self, request: Request, prompt: prompts.Prompt):
        self._request = request
        self._completion_tokens = [0] * request.params.n
        self._chats = [prompts.ChatAnswer(prompt, i) for i in range(request.params.n)] if prompt.chat_parser else []
        self._prompt_logprobs_sent = False

    def message(self, events: Sequence[TokenEvent]) -> pb.GenerateResponse:
        request = self._request
        message = pb.GenerateResponse(request_id=request.request_id)
        for event in events:
            self._completion_tokens[event.index] = event.num_output_tokens
            output = convert.output(event)
            if self._chats:
                output.chat.CopyFrom(self._chats[event.index].delta(event))
            message.outputs.append(output)
            if event.prompt_logprobs is not None and not self._prompt_logprobs_sent:
                self._prompt_logprobs_sent = True
                message.prompt_logprobs.CopyFrom(
                    convert.prompt_logprobs(event.prompt_logprobs, request.prompt_token_ids)
                )
        message.usage.prompt_tokens = request.num_prompt_tokens
        message.usage.cached_tokens = max((event.num_cached_tokens for event in events), default=0)
        message.usage.completion_tokens = sum(self._completion_tokens)
        return message

    def aborted(self) -> pb.GenerateResponse:
        """Of a request that ended before the engine knew it."""
        return self.message(
            [
                TokenEvent(request_id=self._request.request_id, index=index, finish_reason=FinishReason.ABORT)
                for index in range(self._request.params.n)
            ]
        )
