"""`dflash generate --endpoint`: answers from OpenAI-compatible servers, many requests at a time.

A server that stops responding is set aside and named, the others go on; with none left the run
fails and can be run again. Threads only wait for servers; the file is written by the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

from dflash_pipeline.capture.answer_file import AnswerFile
from dflash_pipeline.capture.answers import Dialogue, answer_seed
from dflash_pipeline.capture.arguments import template_arguments
from dflash_pipeline.capture.model import TargetFiles
from dflash_pipeline.capture.samples import Dropped, Message
from dflash_pipeline.capture.servers import Refused, Servers
from dflash_pipeline.configs.schema import Run, TargetConfig
from dflash_pipeline.store.runlog import RunLog


def answer_all(
    fresh: Iterator[Dialogue],
    out: AnswerFile,
    run: Run,
    files: TargetFiles | None,
    num_todo: int,
    dropped: Dropped,
    log: RunLog,
) -> int:
    """Answer with the servers of `generate.endpoints`; the number of new answers.

    Prompts that a server refuses are counted in `dropped`. Raises ValueError when no server is
    left or when more prompts were refused than `data.max_bad_share` allows.
    """
    servers = Servers(run.generate, log.say)
    servers.start()
    most = run.generate.concurrency * len(run.generate.endpoints)
    num_new = num_refused = 0
    pool = ThreadPoolExecutor(max_workers=most)
    pending: dict[Future[None], Dialogue] = {}
    try:
        while True:
            for dialogue in islice(fresh, 2 * most - len(pending)):
                pending[pool.submit(_answer, dialogue, servers, run, files)] = dialogue
            if not pending:
                break
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            lines = []
            for future in done:
                dialogue = pending.pop(future)
                try:
                    future.result()
                    lines.append(dialogue.line(run.generate))
                except Refused as error:
                    num_refused += 1
                    dropped.add(str(error), dialogue.key)
            if lines:
                out.append(lines)
                num_new += len(lines)
            log.part(num_new + num_refused, num_todo, "answers", servers=servers.num_alive)
    finally:
        # an error must not wait for answers that nobody will write
        servers.close()
        pool.shutdown(wait=True, cancel_futures=True)
    if num_refused > run.data.max_bad_share * max(1, num_todo):
        raise ValueError(
            f"the servers refused {num_refused} of {num_todo} prompts, data.max_bad_share allows "
            f"{run.data.max_bad_share:g}: {'; '.join(dropped.lines())}"
        )
    return num_new


def _answer(dialogue: Dialogue, servers: Servers, run: Run, files: TargetFiles | None) -> None:
    """All turns of one dialogue. Raises Refused when a server will not have its first one."""
    while dialogue.questions:
        messages = dialogue.ask()
        try:
            reply = servers.complete(_request(dialogue, messages, run))
        except Refused:
            if not dialogue.finishes:
                raise
            dialogue.withdraw()
            return
        choice = _choice(reply)
        message = {"role": "assistant", "content": str(choice["message"].get("content") or "")}
        reasoning = choice["message"].get("reasoning_content")
        if isinstance(reasoning, str) and reasoning.strip():
            message["reasoning_content"] = reasoning
        is_cut = choice.get("finish_reason") == "length"
        dialogue.answer(message, "length" if is_cut else "stop")
        prompt, answer = reply.get("prompt_token_ids"), choice.get("token_ids")
        if isinstance(prompt, list) and isinstance(answer, list):
            tokenizer = files.tokenizer() if files is not None else None
            dialogue.answer_tokens(prompt, answer, tokenizer, run.target)
        else:
            # the whole conversation's ids or none: capture tokenises the text
            dialogue.token_ids, dialogue.loss_spans = [], []


def _request(dialogue: Dialogue, messages: list[Message], run: Run) -> dict[str, Any]:
    config = run.generate
    return chat_request(
        messages,
        run.target,
        max_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=answer_seed(config.seed, dialogue.key, len(dialogue.finishes)),
    )


def chat_request(
    messages: list[Message],
    target: TargetConfig,
    *,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
) -> dict[str, Any]:
    """The body of a chat completion, but for the model's name."""
    if target.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": target.system_prompt}, *messages]
    request: dict[str, Any] = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
    }
    if top_k > 0:
        request["top_k"] = top_k
    if arguments := template_arguments(target):
        request["chat_template_kwargs"] = arguments
    return request


def _choice(reply: dict[str, Any]) -> dict[str, Any]:
    try:
        choice = reply["choices"][0]
        choice["message"].get("content")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Refused("a reply without an answer") from error
    return dict(choice)
