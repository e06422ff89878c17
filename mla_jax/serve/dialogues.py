"""A conversation of other interfaces as messages of a chat, piece by piece in the order in which they were said."""

from typing import Any


class Dialogue:
    """`messages` are those of a chat. Reasoning, text and calls of one answer, which come as pieces, are one message."""

    def __init__(self):
        self.messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None  # the one that the next piece may belong to

    def say(self, role: str, text: str) -> None:
        """A message of anybody but the model."""
        self._add({"role": role, "content": text})

    def result(self, call: str, text: str) -> None:
        """A tool has answered a call, which is named by its id."""
        self._add({"role": "tool", "tool_call_id": call, "content": text})

    def reason(self, text: str) -> None:
        """The model has reasoned. That begins an answer."""
        answer = self._answer_before("content", "tool_calls")
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def answer(self, text: str) -> None:
        """The model has said a text. A second one is another answer."""
        self._answer_before("content", "tool_calls")["content"] = text

    def call(self, id: str, name: str, arguments: Any) -> None:
        """The model has called a tool."""
        function = {"name": name, "arguments": arguments}
        calls = self._answer_before().setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": function})

    def _add(self, message: dict[str, Any]) -> None:
        self._answer = None
        self.messages.append(message)

    def _answer_before(self, *keys: str) -> dict[str, Any]:
        """The answer that goes on, if it has none of `keys` yet, else a new one."""
        answer = self._answer
        if answer is None or any(answer.get(key) for key in keys):
            answer = {"role": "assistant", "content": ""}
            self._add(answer)
            self._answer = answer
        return answer
