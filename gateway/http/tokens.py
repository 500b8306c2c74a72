"""POST /tokenize, /detokenize, /v1/messages/count_tokens and /v1/responses/input_tokens: tokens that a prompt has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from alignedserve.errors import AlignedServeError, InvalidRequestError
from alignedserve.gateway.body.planning import ServedModel
from alignedserve.gateway.body.token_requests import TokenizeRequest, parse_detokenize, parse_tokenize
from alignedserve.gateway.body.tokenising import TooManyTokens, in_turn, tokenise
from alignedserve.gateway.body.truncation import MOST
from alignedserve.gateway.body.turns import turns_for
from alignedserve.gateway.body.values import unknown_fields
from alignedserve.gateway.failures import error_object
from alignedserve.gateway.http.asgi import (
    ClientGoneError,
    DisconnectWatch,
    Receive,
    Scope,
    Send,
    ignored_header,
    parse_json,
    report,
    send_error,
    send_json,
)
from alignedserve.gateway.http.body_reader import BodyReader
from alignedserve.gateway.translated.messages_reply import messages_error
from alignedserve.gateway.translated.messages_request import count_tokens
from alignedserve.text import Prompt, PromptEncoder, Tokenizer

Work = Callable[[Any], Awaitable[tuple[dict[str, Any], Sequence[str]]]]  # a body's answer, and its fields not read


class TokenEndpoints:
    """ASGI endpoints, one method each. Long texts take turns with those of prompts."""

    def __init__(self, model: ServedModel, bodies: BodyReader, count_response: Work) -> None:
        self._model = model
        self._count_response = count_response
        self._bodies = bodies

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send, self._tokens)

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send, self._text)

    async def count(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send, partial(count_tokens, self._model), messages_error)

    async def count_response(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send, self._count_response)

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        work: Work,
        error_body: Callable[[AlignedServeError], dict[str, Any]] = error_object,
    ) -> None:
        async def of(body: bytes) -> tuple[dict[str, Any], Sequence[str]]:
            return await work(parse_json(body))

        try:
            body = await self._bodies.read(scope, receive)
            with DisconnectWatch(receive) as watch:
                answer, ignored = await watch.unless_gone(of(body))
        except ClientGoneError:
            return
        except Exception as error:
            await send_error(send, report(error), body=error_body)
            return
        await send_json(send, answer, headers=ignored_header(ignored))

    async def _tokens(self, body: Any) -> tuple[dict[str, Any], Sequence[str]]:
        request = parse_tokenize(body)
        self._model.require(request.model)
        tokenizer, encoder = self._tokenizer(), self._model.encoder
        assert encoder is not None
        around = request.add_special_tokens
        if around is None:
            around = request.messages is None
        most = max(MOST, self._model.limit[0])
        try:
            (tokens,) = await tokenise(encoder, [await self._prompt(encoder, request)], most, around=around)
        except TooManyTokens:
            message = f"the text has too many tokens: at most {most} are counted"
            raise InvalidRequestError(message, param="prompt" if request.messages is None else "messages") from None
        spelled = (
            [tokenizer.backend.id_to_token(token) or "" for token in tokens] if request.return_token_strs else None
        )
        answer = {
            "count": len(tokens),
            "max_model_len": self._model.limit[0],
            "tokens": tokens,
            "token_strs": spelled,
        }
        return answer, [*unknown_fields(request), *request.unread]

    async def _prompt(self, encoder: PromptEncoder, request: TokenizeRequest) -> Prompt:
        if request.messages is None:
            text = request.prompt or ""
            return await in_turn(partial(encoder.special_in, text)) if request.allow_special_tokens else Prompt(text)
        template = self._model.template
        if template is None:
            message = "this model has no chat template: start the server with --chat-template FILE"
            raise InvalidRequestError(message, param="messages")
        turns = [message.turn for message in turns_for(template, request.messages)]
        variables = request.variables(template)
        if request.continue_final_message:
            return await in_turn(partial(encoder.of_begun_answer, template, turns, variables))
        return await in_turn(partial(encoder.of_chat, template, turns, variables, request.add_generation_prompt))

    async def _text(self, body: Any) -> tuple[dict[str, Any], Sequence[str]]:
        request = parse_detokenize(body)
        info, tokenizer = self._model.require(request.model), self._tokenizer()
        for token in (min(request.tokens, default=0), max(request.tokens, default=0)):
            if not 0 <= token < info.vocab_size:
                message = f"tokens: token id {token} is outside the vocabulary of {info.vocab_size}"
                raise InvalidRequestError(message, param="tokens")
        text = await in_turn(partial(tokenizer.decode, request.tokens, skip_special=False))
        return {"prompt": text}, unknown_fields(request)

    def _tokenizer(self) -> Tokenizer:
        if self._model.tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer", param=None)
        return self._model.tokenizer
