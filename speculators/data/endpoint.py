"""Replies from a server with an OpenAI-compatible chat interface, such as `vllm serve`."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import urlsplit

from speculators.data.answers import Answered, AnswerSettings, Reply, dialogue, seed_of
from speculators.data.forms import Chat, Message, split_reasoning
from speculators.errors import DataError

# What the server may answer differently a moment later.
_PASSING = (408, 409, 425, 429, 500, 502, 503, 504)


class Refused(Exception):
    """The server will not answer this conversation."""


class EndpointWriter:
    """Answers conversations through `POST <url>/chat/completions`, many at a time.

    A server that tells token ids when asked (vLLM) makes rows with the exact tokens; from others `data prepare` finds the
    replies in the text. The key in the environment variable OPENAI_API_KEY is sent, if there is one.

    Args:
        url: up to and including the version, such as `http://localhost:8000/v1`.
        model: as the server calls it; None takes the only one it serves.
        concurrency: conversations at once.
        timeout: seconds for one reply.
        retries: further attempts after a failure that may pass, with doubling pauses.
        pause: seconds before the first of them.

    Raises:
        DataError: nothing answers there, or it serves several models and none is named.
    """

    def __init__(
        self, url: str, model: str | None = None, *, concurrency: int = 32, timeout: float = 600.0, retries: int = 5, pause: float = 1.0
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise DataError(f"the endpoint {url!r} must begin with http:// or https://, as in http://localhost:8000/v1")
        self._url = url.rstrip("/")
        self._concurrency, self._timeout, self._retries, self._pause = concurrency, timeout, retries, pause
        self._asks_for_ids = True
        self.name = model or self._only_model()

    def answer(self, chats: Iterable[tuple[int, Chat]], settings: AnswerSettings) -> Iterator[tuple[int, Answered]]:
        """See `Writer`."""
        pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="endpoint")
        running: set[Future[tuple[int, Answered]]] = set()
        try:
            for number, chat in chats:
                running.add(pool.submit(self._converse, number, chat, settings))
                if len(running) >= self._concurrency:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    # -- inside ------------------------------------------------------------------------------------------------

    def _converse(self, number: int, chat: Chat, settings: AnswerSettings) -> tuple[int, Answered]:
        conversation = dialogue(chat, settings, self.name)
        turn = 0
        try:
            messages = next(conversation)
            while True:
                messages = conversation.send(self._reply(messages, chat.tools, settings, seed_of(settings, number, turn)))
                turn += 1
        except StopIteration as end:
            answered: Answered = end.value
            return number, answered
        except Refused as error:
            return number, Answered(dropped=f"the endpoint refuses it: {error}")

    def _reply(self, messages: list[Message], tools: Sequence[Any] | None, settings: AnswerSettings, seed: int) -> Reply:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": messages,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": settings.max_new_tokens,
            "seed": seed,
        }
        body |= {key: value for key, value in (("top_k", settings.top_k), ("min_p", settings.min_p), ("tools", tools)) if value}
        if settings.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": settings.thinking, "thinking": settings.thinking}
        if self._asks_for_ids:
            try:
                return self._read(self._request("/chat/completions", {**body, "return_token_ids": True}))
            except Refused as error:
                if "return_token_ids" not in str(error):
                    raise
                self._asks_for_ids = False  # a server that knows its interface only
        return self._read(self._request("/chat/completions", body))

    def _read(self, response: Any) -> Reply:
        try:
            choice = response["choices"][0]
            message, finish_reason = choice["message"], str(choice["finish_reason"])
            content = str(message.get("content") or "")
        except (KeyError, IndexError, TypeError):
            raise DataError(f"{self._url} answers without choices; it must serve OpenAI's chat completions") from None
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning is None:
            reasoning, content = split_reasoning(content)
        prompt_ids, token_ids = response.get("prompt_token_ids"), choice.get("token_ids")
        told = isinstance(prompt_ids, list) and isinstance(token_ids, list)
        return Reply(
            content,
            reasoning or None,
            finish_reason,
            prompt_ids if told else None,
            token_ids if told else None,
        )

    def _only_model(self) -> str:
        try:
            models = [str(entry["id"]) for entry in self._request("/models")["data"]]
        except (Refused, KeyError, TypeError) as error:
            raise DataError(f"{self._url} does not say which models it serves ({error}); name one") from None
        if len(models) != 1:
            raise DataError(f"{self._url} serves {', '.join(models) or 'no model'}; name one")
        return models[0]

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """One answer in JSON; tries again where that may help."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(self._retries + 1):
            try:
                request = urllib.request.Request(self._url + path, data, headers)
                with urllib.request.urlopen(request, timeout=self._timeout) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                said = _message_of(error)
                if error.code in (401, 403, 404):
                    raise DataError(
                        f"{self._url}{path} answers {error.code}: {said}; check the address, the model and OPENAI_API_KEY"
                    ) from None
                if error.code not in _PASSING:
                    raise Refused(said) from None
                reason = f"{error.code}: {said}"
            except (OSError, ValueError) as error:  # no connection, a broken one, half an answer
                reason = str(getattr(error, "reason", error))
            if attempt < self._retries:
                time.sleep(self._pause * 2**attempt)
        raise DataError(f"{self._url} failed {self._retries + 1} times ({reason}); the same command goes on from what is answered")


def _message_of(error: urllib.error.HTTPError) -> str:
    """The server's own words in one short line."""
    text = error.read().decode(errors="replace")
    try:
        found = json.loads(text)
        found = found.get("error", found)
        text = str(found.get("message", text)) if isinstance(found, dict) else str(found)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:160]
