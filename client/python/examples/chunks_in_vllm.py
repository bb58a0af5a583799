#!/usr/bin/env python3
"""Asks a vLLM server with the connector's setting `chunks` (docs/blend.md) a question about documents. Each document's KV is computed once, and serves in
any order and with any other documents.

    chunks_in_vllm.py --url http://127.0.0.1:8000 --question "Who signed it?" contract.txt letter.txt notes.txt

It stores each document, unless that is done already, then sends the prompt in pieces and prints the answer. Run it again with the files in another order: then
the server computes nearly nothing of them. This is an example, with the standard library only: no TLS, no chat template.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
import uuid
from collections.abc import Sequence
from typing import Any

from ucmclient import blend

#: Seconds.
PATIENCE = 600


class Server:
    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.model = self._call("/v1/models")["data"][0]["id"]

    def _call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}), timeout=PATIENCE) as answer:
            return json.load(answer)

    def tokens(self, text: str) -> list[int]:
        return self._call("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})["tokens"]

    def complete(self, tokens: Sequence[int], n: int, **body: Any) -> dict[str, Any]:
        return self._call("/v1/completions", {"model": self.model, "prompt": list(tokens), "max_tokens": n, "temperature": 0, **body})

    def store(self, chunk: Sequence[int]) -> None:
        """Loads what is stored, computes the rest, and stores that."""
        self.complete(chunk, 1, **blend.STORE_BODY)

    def answer(self, tokens: Sequence[int], spans: Sequence[blend.Span], policy: blend.Policy, block_tokens: int, n: int, **body: Any) -> dict[str, Any]:
        """To the whole prompt; the pieces before the last only leave their KV."""
        found: dict[str, Any] = {}
        for piece in blend.pieces(tokens, spans, policy, block_tokens=block_tokens, salt=uuid.uuid4().hex):
            found = self.complete(piece.tokens, n if piece.last else 1, **piece.body, **(body if piece.last else {}))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks vLLM about documents whose KV it has computed once.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--block-size", type=int, default=16, help="the server's")
    parser.add_argument("--first", type=int, default=64, help="tokens of each document to compute again")
    parser.add_argument("--question", required=True)
    parser.add_argument("--answer-tokens", type=int, default=200)
    parser.add_argument("documents", nargs="+", help="files of text")
    asked = parser.parse_args()

    server = Server(asked.url)
    chunks = []
    for path in asked.documents:
        with open(path, encoding="utf-8") as document:
            chunks.append(server.tokens(document.read()))
        server.store(chunks[-1])
    tokens, spans = blend.join(chunks, server.tokens("\n")[-1], asked.block_size)
    tokens += server.tokens(f"\nQuestion: {asked.question}\nAnswer:")
    print(server.answer(tokens, spans, blend.First(asked.first), asked.block_size, asked.answer_tokens)["choices"][0]["text"])


if __name__ == "__main__":
    main()
