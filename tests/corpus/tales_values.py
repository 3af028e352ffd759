"""Stories about values: what is the same in every dialect, and what is not (selection page, section 2)."""

from __future__ import annotations

from collections.abc import Iterator

from tests.corpus.telling import (
    Json,
    Story,
    arguments,
    call,
    function_call,
    message,
    output,
    reasoning,
    refuses,
    said,
    selects,
    tool_call,
    tool_result,
    tool_use,
    tools,
    user,
)


def stories() -> Iterator[Story]:
    """Tell the stories of this file."""
    yield from _dialects()
    yield from _texts()
    yield from _reasoning()
    yield from _calls()
    yield from _arguments()
    yield from _environment()


def _one(name: str, told: str, served: Json | list[Json], returned: Json | list[Json]) -> Story:
    """One captured call whose reply comes back in another form that means the same."""
    served = served if isinstance(served, list) else [served]
    returned = returned if isinstance(returned, list) else [returned]
    expect = selects("c1", why={"c1": "content"})
    return Story(name, told, [call("c1", *served)], output(user(), *returned), expect)


def _edited(name: str, told: str, served: Json | list[Json], returned: Json | list[Json], *mentions: str) -> Story:
    """One captured call whose reply comes back changed: a refusal at the item."""
    story = _one(name, told, served, returned)
    expect = refuses("match_missing", *mentions, where="$.response.output[1]")
    return Story(name, told, story.calls, story.result, expect)


def _dialects() -> Iterator[Story]:
    yield Story(
        "served_chat_returned_responses",
        """The engine served Chat; the harness kept a Responses history. One Chat message with text and two tool
        calls is the same as a message item and two function_call items. A matcher that compares messages with items
        one to one would find nothing.""",
        [
            call("c1", tools(tool_call("t1", "ls", '{"path":"."}'), tool_call("t2", "pwd", ""), text="Looking.")),
            call("c2", said("There are 3 files."), parent="c1"),
        ],
        output(
            user(),
            message("Looking."),
            function_call("t1", "ls", '{ "path" : "." }'),
            function_call("t2", "pwd"),
            tool_result("t1"),
            tool_result("t2"),
            message("There are 3 files."),
        ),
        selects("c1", "c2", why={"c1": "content", "c2": "content"}),
    )
    yield Story(
        "served_responses_returned_chat",
        """The engine served Responses items; the harness kept Chat messages and handed them back as `messages`. The
        reasoning item, the message and the call of one reply are one message there.""",
        [
            call("c1", reasoning("Hm."), message("Looking."), function_call("t1", "ls"), dialect="responses"),
            call("c2", message("Done."), parent="c1", dialect="responses"),
        ],
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                user(),
                tools(tool_call("t1", "ls"), text="Looking.", reasoning_content="Hm."),
                {"role": "tool", "tool_call_id": "t1", "content": "a b"},
                said("Done."),
            ],
            "reward": 0.5,
        },
        selects("c1", "c2", why={"c1": "content", "c2": "content"}),
    )
    yield Story(
        "served_messages_returned_chat",
        """The engine served the Messages format, where tool inputs are objects; the harness kept Chat messages, where
        arguments are strings. They are compared as the JSON value that they are.""",
        [
            call(
                "c1",
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
                        {"type": "text", "text": "Looking."},
                        tool_use("t1", "ls", {"depth": 2, "path": "."}),
                    ],
                },
                dialect="messages",
            ),
        ],
        {
            "messages": [
                user(),
                tools(tool_call("t1", "ls", '{"path":".","depth":2.0}'), text="Looking.", reasoning="Hm."),
            ],
            "reward": 1.0,
        },
        selects("c1", why={"c1": "content"}),
    )
    yield Story(
        "served_responses_returned_messages",
        """The engine served Responses items; the harness talks the Messages format and returned an Anthropic history
        with thinking blocks, tool_use and tool_result parts. A user message that is nothing but tool results is no
        bound.""",
        [
            call("c1", reasoning("Hm."), function_call("t1", "ls", '{"n":1}')),
            call("c2", message("Done."), parent="c1"),
        ],
        {
            "messages": [
                user(),
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "Hm."}, tool_use("t1", "ls", {"n": 1})],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "Done."}]},
            ],
        },
        selects("c1", "c2", why={"c1": "content", "c2": "content"}),
    )
    yield Story(
        "messages_history",
        """The result has neither `response` nor `responses`, only the Chat `messages` the harness kept. They are one
        envelope. NVIDIA's module reads Responses output only; here a Chat harness needs no converter.""",
        [call("c1", said("one")), call("c2", said("two"), parent="c1")],
        {"messages": [user(), said("one"), user("and then?"), said("two")], "reward": 0.0},
        selects("c1", "c2", why={"c1": "content", "c2": "content"}),
    )


def _texts() -> Iterator[Story]:
    yield _one(
        "text_parts_joined",
        """One text was served in three parts, one of them empty; the harness glued them together. Parts of one message
        are joined, and empty text is nothing.""",
        message("The ans", "", "wer is 4."),
        said("The answer is 4."),
    )
    yield _one(
        "refusal_part_equals_refusal_field",
        """A refusal was served as a content part and returned as the Chat `refusal` field: the same refusal.""",
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
        said(None, refusal="I cannot."),
    )
    yield _edited(
        "refusal_is_not_text",
        """The model refused; the harness kept the words as ordinary text. A refusal never equals text: training it as
        an answer would teach something else than was sampled.""",
        said(None, refusal="I cannot."),
        message("I cannot."),
        "text_edited",
        "refusal 'I cannot.'",
    )
    yield _one(
        "image_part_kept",
        """The model produced an image beside its text. The image is compared as JSON; id, status and null keys of the
        part itself are transport.""",
        said(None, content=[{"type": "output_image", "image": {"id": "i1", "b64": "aGk="}, "id": "p1"}]),
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_image", "image": {"b64": "aGk=", "id": "i1"}, "status": "done", "alt": None}],
        },
    )
    yield _edited(
        "image_payload_changed",
        """The id inside the image's own payload changed. Transport keys are left out on the part itself and never
        inside media, so this is another image.""",
        said(None, content=[{"type": "output_image", "image": {"id": "i1", "b64": "aGk="}}]),
        said(None, content=[{"type": "output_image", "image": {"id": "i2", "b64": "aGk="}}]),
        "other",
    )
    yield _one(
        "empty_reply_matches_empty_call",
        """The model answered nothing at all, and the harness kept that turn. It is `empty`, equal to another `empty`
        in whatever form: null, an empty string, no parts, a part of empty text.""",
        said(None),
        message(""),
    )
    yield Story(
        "empty_item_beside_a_call",
        """The reply came as an empty message and a tool call. Both sides may keep or drop the empty message: a call
        with something to show ignores its own, and a returned one inside the span is passed over.""",
        [
            call("c1", message(""), function_call("t1", "ls")),
            call("c2", function_call("t2", "ls"), parent="c1"),
        ],
        output(user(), function_call("t1", "ls"), tool_result("t1"), message(""), function_call("t2", "ls")),
        selects("c1", "c2", why={"c1": "content", "c2": "content"}),
    )
    yield Story(
        "empty_item_alone",
        """An empty turn stands alone between two user turns, and no captured call showed nothing. Nobody made it, so
        the rollout is refused rather than passing over what may have been a real reply.""",
        [call("c1", said("one")), call("c2", said("two"), parent="c1")],
        output(message("one"), user(), message(""), user(), message("two")),
        refuses("match_missing", "shows nothing", where="$.response.output[2]"),
    )
    yield _one(
        "null_absent_and_empty_content",
        """Null, absent, an empty string and an empty list of content are one value beside a tool call.""",
        {"role": "assistant", "content": "", "tool_calls": [tool_call("t1", "ls")]},
        {"role": "assistant", "tool_calls": [tool_call("t1", "ls")], "refusal": None, "audio": None},
    )
    yield _edited(
        "placeholder_is_content",
        """The harness wrote `(no content)` where the model had said nothing. A visible placeholder is content: the
        model never sampled it.""",
        said(""),
        said("(no content)"),
        "'(no content)'",
    )
    yield _one(
        "transport_is_ignored",
        """Item ids that nobody captured, status, index, cache_control, annotations, token arrays, log-probs and null
        keys came and went between capture and result. None of it is what the model said.""",
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "generation_token_ids": [5, 6],
            "content": [{"type": "output_text", "text": "4", "logprobs": [], "annotations": [{"url": "x"}]}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_local_1",
            "index": 3,
            "name": None,
            "content": [{"type": "text", "text": "4", "cache_control": {"type": "ephemeral"}}],
        },
    )
    yield _edited(
        "unicode_not_normalised",
        """The harness stored `e` with a combining accent as one letter. They look alike and are other tokens, so the
        text is another; the refusal says that only the Unicode form differs.""",
        said("Caf\u0065\u0301"),
        said("Caf\u00e9"),
        "unicode_form",
        "c1",
    )
    yield _edited(
        "line_endings_changed",
        """The harness rewrote line ends on its way through a Windows file. No line-end folding: refused.""",
        said("one\ntwo"),
        said("one\r\ntwo"),
        "\\r\\n",
    )
    yield _one(
        "lone_surrogate",
        """Half of a surrogate pair was sampled. It is hashed through a reversible escape and never breaks the run.""",
        said("half \ud83d of it"),
        message("half \ud83d of it"),
    )
    yield _one(
        "markup_and_control_characters",
        """The model wrote markup, escape sequences of a terminal and text-direction marks. They are selected exactly as
        they are; whoever shows them must defuse them.""",
        said("<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J\x1b]0;owned\x07\x00\u202egnp.exe\u2066"),
        said("<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J\x1b]0;owned\x07\x00\u202egnp.exe\u2066"),
    )
    yield _edited(
        "markup_and_control_characters_refused",
        """The same kind of text, edited by the harness: the refusal quotes it, so messages and pages that show the
        refusal must defuse it as well.""",
        said("<b onmouseover=alert(1)>\x1b[31mred"),
        said("<b onmouseover=alert(1)>\x1b[32mred"),
        "text_edited",
    )


def _reasoning() -> Iterator[Story]:
    yield _one(
        "reasoning_summary_stands_in",
        """The reasoning item has no content, only a summary in two pieces. Then the summary is its text, joined with
        nothing between; the Chat history holds the same text.""",
        [
            {"type": "reasoning", "content": [], "summary": [{"text": "First. "}, {"text": "Second."}]},
            message("4"),
        ],
        said("4", reasoning_content="First. Second.", reasoning="First. Second."),
    )
    yield _one(
        "reasoning_signature_is_transport",
        """Signatures and an encrypted payload beside readable text only transport: they may go or change.""",
        [reasoning("Hm.", encrypted_content="b3BhcXVl", id=None), message("4")],
        [{"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}]}, message("4")],
    )
    yield _one(
        "encrypted_reasoning_alone",
        """Reasoning came as opaque bytes without text; the same bytes came back. They are compared as they are.""",
        [{"type": "reasoning", "summary": [], "encrypted_content": "b3BhcXVl"}, message("4")],
        {
            "role": "assistant",
            "content": [{"type": "redacted_thinking", "data": "b3BhcXVl"}, {"type": "text", "text": "4"}],
        },
    )
    yield _edited(
        "encrypted_reasoning_changed",
        """The opaque payload came back as other bytes. Nobody can say that they mean the same: refused.""",
        [{"type": "reasoning", "summary": [], "encrypted_content": "b3BhcXVl"}, message("4")],
        [{"type": "reasoning", "summary": [], "encrypted_content": "b3RoZXI="}, message("4")],
        "reasoning_changed",
    )
    yield Story(
        "reasoning_fields_disagree",
        """A Chat message carries `reasoning_content` and `reasoning` with two different texts. One of them is wrong
        and nothing says which; the item is refused.""",
        [call("c1", said("4", reasoning_content="Hm."))],
        output(said("4", reasoning_content="Hm.", reasoning="Aha.")),
        refuses("output_malformed", "reasoning", where="$.response.output[0]"),
    )
    yield _edited(
        "reasoning_dropped",
        """The harness threw the reasoning away. By default that is an edited reply: the row would train tokens that
        the history does not show. The refusal says that reasoning is missing.""",
        [reasoning("Two and two."), message("4")],
        said("4"),
        "reasoning_missing",
        "c1",
    )
    yield _edited(
        "reasoning_edited",
        """The harness summarised the reasoning in its own words.""",
        [reasoning("Two and two is four."), message("4")],
        said("4", reasoning_content="Two and two make four."),
        "reasoning_changed",
    )


def _calls() -> Iterator[Story]:
    yield _one(
        "tool_namespace",
        """The tool call names its namespace in a field of its own; the Chat history joined it with two underscores.""",
        function_call("t1", "read", '{"a":1}', namespace="files"),
        tools(tool_call("t1", "files__read", '{"a":1}')),
    )
    free_form: list[Json] = [
        {"type": "custom_tool_call", "call_id": "t1", "name": "patch", "input": "*** Begin\n"},
        {"type": "local_shell_call", "call_id": "t2", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "shell_call", "call_id": "t3", "action": {"commands": ["pwd"]}},
        {"type": "apply_patch_call", "call_id": "t4", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "computer_call", "call_id": "t5", "action": {"type": "click", "x": 1, "y": 2}},
    ]
    yield _one(
        "every_kind_of_tool_call",
        """Custom, shell, local-shell, apply-patch and computer calls of one reply, returned with other transport
        fields. Each keeps its own kind: a shell call is never a function that happens to be called shell.""",
        [{**item, "id": f"srv_{number}", "status": "completed"} for number, item in enumerate(free_form)],
        [{**item, "status": "in_progress"} for item in free_form],
    )
    yield _edited(
        "custom_input_is_exact_text",
        """The input of a custom tool is free text, even if it looks like JSON: a blank more is another input.""",
        {"type": "custom_tool_call", "call_id": "t1", "name": "sql", "input": '{"a":1}'},
        {"type": "custom_tool_call", "call_id": "t1", "name": "sql", "input": '{"a": 1}'},
        "arguments_changed",
    )
    yield _one(
        "custom_tool_call_in_chat",
        """A custom tool call was served as a Chat tool call of type custom and returned as a Responses item.""",
        tools({"id": "t1", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}),
        {"type": "custom_tool_call", "call_id": "t1", "name": "sql", "input": "select 1"},
    )
    yield _edited(
        "tool_call_id_changed",
        """The harness gave the call an id of its own. The id is part of the call: its result refers to it. Option
        `tool_call_ids=renamed` exists for harnesses that do this always.""",
        function_call("t1", "ls", '{"a":1}'),
        function_call("x9", "ls", '{"a":1}'),
        "call_id_changed",
        "t1",
    )


def _arguments() -> Iterator[Story]:
    yield Story(
        "no_arguments_are_one_value",
        """Absent, null, the empty string, the string `null` and an empty object are all no arguments.""",
        [
            call("c1", function_call("a", "f", ""), function_call("b", "f", "null"), function_call("c", "f", "{}")),
            call("c2", tools({"id": "d", "function": {"name": "f"}}, tool_call("e", "f", None)), parent="c1"),
        ],
        output(
            *(
                function_call(name, "f", given)
                for name, given in zip("abcde", ["null", " { } ", "", "", "{}"], strict=True)
            ),
        ),
        selects("c1", "c2", why={"c1": "content", "c2": "content"}),
    )
    yield _one(
        "numbers_by_value",
        """Numbers are compared by exact decimal value, whatever their spelling, and never expanded.""",
        arguments('{"a":4200,"b":-0,"c":1e999999999,"d":0.50}'),
        arguments('{"d":5e-1,"c":10E999999998,"b":0.0,"a":42e2}'),
    )
    yield _edited(
        "big_integers_differ",
        """Two integers that are one double. Read through floats they would be equal; they are not.""",
        arguments('{"id":9007199254740993}'),
        arguments('{"id":9007199254740992}'),
        "arguments_changed",
    )
    yield _edited(
        "true_is_not_one",
        """A harness wrote 1 for true. In Python they are equal; in JSON they are not.""",
        arguments('{"force":true}'),
        arguments('{"force":1}'),
        "arguments_changed",
    )
    yield _edited(
        "null_members_count",
        """A harness left out a member that was null. Inside arguments a null member counts.""",
        arguments('{"a":1,"b":null}'),
        arguments('{"a":1}'),
        "arguments_changed",
    )
    yield _edited(
        "transport_key_inside_arguments",
        """`status` on an item is transport; `status` inside its arguments is what the model wrote.""",
        function_call("t1", "set", '{"status":"open"}', status="completed"),
        function_call("t1", "set", '{"status":"closed"}', status="completed"),
        "arguments_changed",
    )
    yield _edited(
        "arguments_parsed_once",
        """The harness encoded the arguments twice. A string that is JSON is read as that value, once: a string that
        holds an object is not that object.""",
        arguments('{"a":1}'),
        arguments('"{\\"a\\":1}"'),
        "arguments_changed",
    )
    yield _one(
        "nan_is_exact_text",
        """NaN is not JSON, so these arguments are exact text, and the same text came back.""",
        arguments('{"x": NaN}'),
        tools(tool_call("call_1", "run", '{"x": NaN}')),
    )
    yield _edited(
        "nan_respaced",
        """The same arguments with one blank less: exact text differs.""",
        arguments('{"x": NaN}'),
        arguments('{"x":NaN}'),
        "arguments_changed",
    )
    yield _edited(
        "repeated_keys_rewritten",
        """The model repeated a key, deep inside. A harness that loads and dumps the arguments keeps the last one only;
        that is another text, and a key that repeats makes the string exact text.""",
        arguments('{"o":{"a":1,"a":2}}'),
        arguments('{"o":{"a":2}}'),
        "arguments_changed",
    )
    yield _one(
        "repeated_keys_kept",
        """The same arguments, kept as the string they were.""",
        arguments('{"o":{"a":1,"a":2}}'),
        tools(tool_call("call_1", "run", '{"o":{"a":1,"a":2}}')),
    )
    cut = call("c1", arguments('{"path":"/tm'), finish_reason="length", response_status="incomplete")
    yield Story(
        "truncated_arguments_are_exact_text",
        """The reply hit its length limit inside the arguments. The broken text is compared exactly, and the rollout is
        marked truncated.""",
        [cut],
        output(user(), tools(tool_call("call_1", "run", '{"path":"/tm'))),
        selects("c1", why={"c1": "content"}, truncated=True),
    )
    yield Story(
        "item_too_deep",
        """Arguments nested deeper than any tool reads. The limit is a clear refusal and never a crash.""",
        [call("c1", arguments("{}"))],
        output(arguments("[" * 130 + "]" * 130)),
        refuses("item_too_deep", "128", where="$.response.output[0]"),
    )


def _environment() -> Iterator[Story]:
    yield Story(
        "environment_items_passed_over",
        """Everything that the environment may put into a history: user, system and developer messages, tool messages,
        outputs of every kind of tool, results in the Messages format, compaction and context-management markers. None
        of it is the model's, none of it is an error.""",
        [call("c1", tools(tool_call("t1", "ls"))), call("c2", said("Done."), parent="c1")],
        output(
            {"role": "system", "content": "Be brief."},
            {"type": "message", "role": "developer", "content": "Use tools."},
            user(),
            function_call("t1", "ls"),
            {"role": "tool", "tool_call_id": "t1", "content": "a"},
            *(
                {"type": kind, "call_id": "t1", "output": "a"}
                for kind in (
                    "function_call_output",
                    "custom_tool_call_output",
                    "local_shell_call_output",
                    "shell_call_output",
                    "apply_patch_call_output",
                    "computer_call_output",
                )
            ),
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a"}]},
            {"type": "compaction", "encrypted_content": "x"},
            {"type": "context_compaction"},
            message("Done."),
        ),
        selects("c1", "c2", why={"c1": "content", "c2": "content"}),
    )
    yield Story(
        "type_decides_before_role",
        """A tool's output carries the role `assistant`, as one adapter writes it. The type decides: it is environment.
        Read by role it would be an item that no call explains.""",
        [call("c1", tools(tool_call("t1", "ls"))), call("c2", said("Done."), parent="c1")],
        output(function_call("t1", "ls"), {**tool_result("t1"), "role": "assistant"}, message("Done.")),
        selects("c1", "c2", why={"c1": "content", "c2": "content"}),
    )
    yield Story(
        "server_executed_item",
        """The history holds a web search that the server ran inside the reply. Its tokens are not the model's alone
        and its result is in the middle of a generation: refused with type, id and place.""",
        [call("c1", said("Found it."))],
        output(user(), {"type": "web_search_call", "id": "ws_1", "status": "completed"}, message("Found it.")),
        refuses("item_type_unsupported", "web_search_call", "ws_1", "server", where="$.response.output[1]"),
    )
    yield Story(
        "unknown_item_type",
        """An item of a type that is on no list, from a newer API. Unknown never means ignore.""",
        [call("c1", said("Done."))],
        output(message("Done."), {"type": "hologram", "id": "h1"}),
        refuses("item_type_unsupported", "hologram", "h1", where="$.response.output[1]"),
    )
